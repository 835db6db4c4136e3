DELETE FROM main.fencelock_locks WHERE name = ?1
