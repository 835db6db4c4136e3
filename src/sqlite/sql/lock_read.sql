SELECT last_token, capacity, used_unix_us FROM main.fencelock_locks WHERE name = ?1
