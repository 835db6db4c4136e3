INSERT INTO main.fencelock_values (resource, value, writer) VALUES (?1, ?2, ?3)
ON CONFLICT (resource) DO UPDATE SET value = excluded.value, writer = excluded.writer
