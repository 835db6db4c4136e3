INSERT INTO main.fencelock_fences (resource, token, holder, seq, domain)
VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (resource) DO UPDATE SET
    token = excluded.token,
    holder = excluded.holder,
    seq = excluded.seq,
    domain = excluded.domain
