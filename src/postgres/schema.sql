-- The tables of fencelock, and what all its functions share. Run it as often as you like: it
-- creates what is missing and replaces functions, and leaves data as it is.

BEGIN;

-- First users that come together create one schema, one after the other.
SELECT pg_advisory_xact_lock(hashtextextended('fencelock schema {schema}', 0));

CREATE SCHEMA IF NOT EXISTS "{schema}";

-- One row: the identity of this data, the layout's version, and the floor of new names.
CREATE TABLE IF NOT EXISTS "{schema}".meta (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    realm   text    NOT NULL CHECK (realm ~ '^[0-9a-f]{32}$'),
    -- At least the last token of every name that was pruned, so that no token goes down (L10).
    floor   bigint  NOT NULL DEFAULT 0 CHECK (floor >= 0)
);

INSERT INTO "{schema}".meta (version, realm)
VALUES ({version}, replace(gen_random_uuid()::text, '-', ''))
ON CONFLICT DO NOTHING;

DO $check$
BEGIN
    IF (SELECT version FROM "{schema}".meta) <> {version} THEN
        RAISE EXCEPTION 'the schema is of another version of fencelock'
            USING ERRCODE = 'FL006', DETAIL = format('found=%s expected={version}',
                (SELECT version FROM "{schema}".meta));
    END IF;
    IF to_regtype('"{schema}".holder') IS NULL THEN
        CREATE TYPE "{schema}".holder AS (
            id       bytea,        -- the holder's secret
            token    bigint,
            ttl_ms   bigint,
            expires  timestamptz,  -- by this server's clock
            released boolean,      -- given up with a linger time: keeps others out, and is nobody's
            info     bytea         -- JSON for people; decides nothing
        );
    END IF;
END
$check$;

-- One row for each lock name, with its holders in it: whatever happens to a lock is the update of
-- one locked row. A release leaves the row, and with it the last token (L10).
CREATE TABLE IF NOT EXISTS "{schema}".locks (
    name       bytea PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 512),
    last_token bigint CHECK (last_token > 0),
    capacity   integer CHECK (capacity BETWEEN 1 AND 1000),
    holders    "{schema}".holder[] NOT NULL DEFAULT '{}',
    -- When the last of the holders lapses, or lapsed, or gave up.
    busy_until timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 60);

-- One row for each fenced resource: its watermark. Never deleted (S1).
CREATE TABLE IF NOT EXISTS "{schema}".fences (
    resource bytea PRIMARY KEY CHECK (octet_length(resource) BETWEEN 1 AND 512),
    token    bigint CHECK (token > 0),
    holder   bytea CHECK (octet_length(holder) = 16),
    seq      bigint NOT NULL DEFAULT 0 CHECK (seq >= 0),
    domain   text
) WITH (fillfactor = 60);

-- The values of the command line's `put` and `get`.
CREATE TABLE IF NOT EXISTS "{schema}".kv (
    resource bytea PRIMARY KEY REFERENCES "{schema}".fences,
    value    bytea NOT NULL,
    writer   bigint NOT NULL
);

-- Refuses a token above both `last + 2^32` and the present time in microseconds plus one day (S11).
CREATE OR REPLACE FUNCTION "{schema}".check_jump(p_last bigint, p_token bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_limit numeric := greatest(
        coalesce(p_last, 0)::numeric + 4294967296,
        floor(extract(epoch FROM clock_timestamp())::numeric * 1000000) + 86400000000);
BEGIN
    IF p_token > v_limit THEN
        RAISE EXCEPTION 'fencing token is implausibly far ahead and was refused'
            USING ERRCODE = 'FL003', DETAIL = format('token=%s limit=%s watermark=%s',
                p_token, v_limit, coalesce(p_last::text, 'none'));
    END IF;
END
$body$;

-- Makes this transaction's commit durable before it is answered (L8, S10), whatever the server's
-- default is.
CREATE OR REPLACE FUNCTION "{schema}".be_durable() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
END
$body$;
