SELECT name FROM main.fencelock_locks
WHERE used_unix_us <= ?1 AND name > ?2
ORDER BY name LIMIT ?3
