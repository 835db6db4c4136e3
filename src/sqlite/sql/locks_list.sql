SELECT name FROM main.fencelock_locks
WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1 AND (?2 IS NULL OR name > ?2)
ORDER BY name LIMIT ?3
