INSERT INTO main.fencelock_holders
    (name, token, id, ttl_ns, ends_ns, boot, time_namespace, released, info)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
ON CONFLICT (name, token) DO UPDATE SET
    ttl_ns = excluded.ttl_ns,
    ends_ns = excluded.ends_ns,
    boot = excluded.boot,
    time_namespace = excluded.time_namespace,
    released = excluded.released
