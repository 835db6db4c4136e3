SELECT token, id, ttl_ns, ends_ns, boot, time_namespace, released, info
FROM main.fencelock_holders WHERE name = ?1 ORDER BY token
