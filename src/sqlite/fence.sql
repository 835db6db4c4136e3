-- For any language: insert into one of these views in the transaction of your write, before the
-- write. The insert admits the fence, raises the resource's watermark with your commit, or fails:
--   fencelock: stale fencing token refused                (also an equal token of another holder)
--   fencelock: this very write was applied before         (the same seq of the same holder)
--   fencelock: the resource is bound to another lock
--   fencelock: fencing token is implausibly far ahead
--   fencelock: not a fence
-- Roll back then. The insert is a write, so it holds SQLite's write lock from there to the end of
-- the transaction: nobody is admitted in between (S2). A transaction that has read before, and
-- which somebody else's write has overtaken, fails with SQLITE_BUSY_SNAPSHOT.

-- By its parts; all but the first two may be NULL, and are then not checked. The rule is
-- `token::judge`.
CREATE VIEW IF NOT EXISTS fencelock_admit (resource, token, holder, domain, seq) AS
SELECT CAST(resource AS TEXT), token, holder, domain, seq FROM fencelock_fences;

CREATE TRIGGER IF NOT EXISTS fencelock_admit_insert INSTEAD OF INSERT ON fencelock_admit
BEGIN
    SELECT RAISE(ABORT, 'fencelock: not a fence')
    WHERE NEW.token IS NULL OR typeof(NEW.token) <> 'integer' OR NEW.token < 1
        OR NEW.resource IS NULL OR length(CAST(NEW.resource AS BLOB)) NOT BETWEEN 1 AND 512
        OR NEW.holder IS NOT NULL
            AND (length(NEW.holder) <> 32 OR NEW.holder GLOB '*[^0-9a-f]*')
        OR NEW.seq IS NOT NULL
            AND (typeof(NEW.seq) <> 'integer' OR NEW.seq < 1 OR NEW.holder IS NULL);

    -- The present time in microseconds plus one day, or the watermark plus 2^32 (S11).
    SELECT RAISE(ABORT, 'fencelock: fencing token is implausibly far ahead')
    WHERE NEW.token > CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000 + 86400000000
        AND NEW.token - 4294967296 > coalesce(
            (SELECT token FROM fencelock_fences WHERE resource = CAST(NEW.resource AS BLOB)), 0);

    SELECT RAISE(ABORT, 'fencelock: the resource is bound to another lock')
    FROM fencelock_fences WHERE resource = CAST(NEW.resource AS BLOB) AND domain <> NEW.domain;

    SELECT RAISE(ABORT, 'fencelock: stale fencing token refused')
    FROM fencelock_fences AS f WHERE f.resource = CAST(NEW.resource AS BLOB)
        AND (NEW.token < f.token
            OR NEW.token = f.token AND (f.holder <> NEW.holder OR NEW.seq < f.seq));

    SELECT RAISE(ABORT, 'fencelock: this very write was applied before')
    FROM fencelock_fences AS f WHERE f.resource = CAST(NEW.resource AS BLOB)
        AND NEW.token = f.token AND NEW.seq = f.seq;

    INSERT INTO fencelock_fences (resource, token, holder, seq, domain)
    VALUES (CAST(NEW.resource AS BLOB), NEW.token, NEW.holder, coalesce(NEW.seq, 0), NEW.domain)
    ON CONFLICT (resource) DO UPDATE SET
        holder = CASE WHEN excluded.token > token THEN excluded.holder
            ELSE coalesce(holder, excluded.holder) END,
        seq = CASE WHEN excluded.token > token THEN excluded.seq
            ELSE max(seq, excluded.seq) END,
        domain = coalesce(domain, excluded.domain),
        token = excluded.token;
END;

-- By its text, as in the environment variable FENCELOCK_FENCE: a token,
-- v1:TOKEN:HOLDER:DOMAIN or v1:TOKEN:HOLDER:DOMAIN:SEQ.
CREATE VIEW IF NOT EXISTS fencelock_admit_fence (resource, fence) AS
SELECT CAST(resource AS TEXT), token FROM fencelock_fences;

CREATE TRIGGER IF NOT EXISTS fencelock_admit_fence_insert INSTEAD OF INSERT ON fencelock_admit_fence
BEGIN
    SELECT RAISE(ABORT, 'fencelock: not a fence')
    WHERE NEW.fence IS NULL OR CAST(NEW.fence AS TEXT) GLOB '*:*' AND NEW.fence NOT GLOB 'v1:*:*:*'
        OR instr(CAST(NEW.fence AS BLOB), x'00') > 0;

    INSERT INTO fencelock_admit (resource, token, holder, domain, seq)
    SELECT NEW.resource,
        -- What is not a plain number becomes NULL, which is no fence.
        CASE WHEN CAST(CAST(token AS INTEGER) AS TEXT) = token THEN CAST(token AS INTEGER) END,
        nullif(holder, '-'),
        CASE WHEN domain = '-' THEN NULL
            WHEN domain GLOB '*[^a-z0-9_=/-]*' OR domain NOT GLOB '?*/?*/?*'
                OR domain GLOB '*/*/*/*' OR domain GLOB '*//*' OR domain GLOB '/*' OR domain GLOB '*/'
                THEN RAISE(ABORT, 'fencelock: not a fence')
            ELSE domain END,
        CASE WHEN seq IS NULL THEN NULL
            WHEN CAST(CAST(seq AS INTEGER) AS TEXT) = seq THEN CAST(seq AS INTEGER)
            ELSE -1 END
    FROM (
        SELECT token, holder,
            CASE WHEN instr(rest, ':') > 0 THEN substr(rest, 1, instr(rest, ':') - 1) ELSE rest END AS domain,
            CASE WHEN instr(rest, ':') > 0 THEN substr(rest, instr(rest, ':') + 1) END AS seq
        FROM (
            SELECT token, substr(rest, 1, instr(rest, ':') - 1) AS holder,
                substr(rest, instr(rest, ':') + 1) AS rest
            FROM (
                SELECT substr(text, 1, instr(text, ':') - 1) AS token,
                    substr(text, instr(text, ':') + 1) AS rest
                FROM (
                    SELECT CASE WHEN NEW.fence GLOB 'v1:*' THEN substr(CAST(NEW.fence AS TEXT), 4)
                        ELSE CAST(NEW.fence AS TEXT) || ':-:-' END AS text
                )
            )
        )
    );
END;

-- What a guarded table's triggers insert into. Many statements may belong to one fence, so a
-- sequence in it is not looked at.
CREATE VIEW IF NOT EXISTS fencelock_guard (resource, fence) AS
SELECT CAST(resource AS TEXT), token FROM fencelock_fences;

CREATE TRIGGER IF NOT EXISTS fencelock_guard_insert INSTEAD OF INSERT ON fencelock_guard
BEGIN
    INSERT INTO fencelock_admit_fence (resource, fence)
    VALUES (NEW.resource, CASE WHEN NEW.fence GLOB 'v1:*:*:*:*'
        THEN rtrim(rtrim(NEW.fence, '0123456789'), ':') ELSE NEW.fence END);
END;

COMMIT;
