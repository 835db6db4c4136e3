INSERT INTO main.fencelock_locks (name, last_token, capacity, used_unix_us)
VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (name) DO UPDATE SET
    last_token = excluded.last_token,
    capacity = excluded.capacity,
    used_unix_us = excluded.used_unix_us
