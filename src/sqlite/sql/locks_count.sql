SELECT count(*) FROM main.fencelock_locks
