-- Changes nothing, and takes SQLite's write lock: whatever is read from here on is the newest.
UPDATE main.fencelock_meta SET one = one WHERE one = 0
