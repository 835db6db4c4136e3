-- What each operation on a lock does, each one call and one transaction.
--
-- Each locks the row first and reads the clock afterwards: clock_timestamp(), because now() is the
-- transaction's start and stale after a wait for the row. Each statement of a function sees what was
-- committed before that statement, under READ COMMITTED, which `begin_change` insists on.

-- What has to be true before anything about a lock is changed.
CREATE OR REPLACE FUNCTION "{schema}".begin_change() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    -- A snapshot from before the wait for a row would judge by what is over.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'locks need the isolation level read committed'
            USING ERRCODE = 'FL005',
                DETAIL = format('found=%s', current_setting('transaction_isolation'));
    END IF;
    PERFORM "{schema}".be_durable();
END
$body$;

-- The row of a lock, locked; made where there was none.
CREATE OR REPLACE FUNCTION "{schema}".lock_row(p_name bytea) RETURNS "{schema}".locks
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_row "{schema}".locks;
BEGIN
    LOOP
        SELECT * INTO v_row FROM "{schema}".locks WHERE name = p_name FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO "{schema}".locks (name) VALUES (p_name) ON CONFLICT DO NOTHING;
    END LOOP;
    IF v_row.last_token IS NULL THEN
        -- Read only now: if the name was pruned while we waited, the floor knows its last token.
        SELECT nullif(floor, 0) INTO v_row.last_token FROM "{schema}".meta;
    END IF;
    RETURN v_row;
END
$body$;

-- Stores the holders of a lock that this transaction has locked.
CREATE OR REPLACE FUNCTION "{schema}".set_holders(
    p_name bytea, p_holders "{schema}".holder[], p_now timestamptz
) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $body$
    UPDATE "{schema}".locks SET
        holders = coalesce(p_holders, '{}'),
        busy_until = coalesce((SELECT max(h.expires) FROM unnest(p_holders) AS h), p_now)
    WHERE name = p_name
$body$;

-- The channel on which the waiters of a lock listen.
CREATE OR REPLACE FUNCTION "{schema}".channel(p_name bytea) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $body$
    SELECT 'fencelock_' ||
        substr(encode(sha256(convert_to('{schema}/', 'UTF8') || p_name), 'hex'), 1, 40)
$body$;

-- Tells the waiters of a lock that it is free, or will be sooner than they heard. A hint: delivered
-- at the commit to whoever listens.
CREATE OR REPLACE FUNCTION "{schema}".wake(p_name bytea) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $body$
    SELECT pg_notify("{schema}".channel(p_name), '')
$body$;

-- Grants a permit with a new token, finds the grant of the same holder again (L7), or says who
-- holds the lock. `outcome` is `granted`, `held` or `capacity`.
CREATE OR REPLACE FUNCTION "{schema}".acquire(
    p_realm text, p_name bytea, p_holder bytea, p_ttl_ms bigint, p_permits integer, p_above bigint,
    p_info bytea,
    OUT outcome text, OUT token bigint, OUT ttl_ms bigint, OUT capacity integer,
    OUT free_in_us bigint, OUT holder_info bytea
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $body$
DECLARE
    v_row  "{schema}".locks;
    v_now  timestamptz;
    v_live "{schema}".holder[];
    v_mine "{schema}".holder;
    v_realm text;
BEGIN
    PERFORM "{schema}".begin_change();
    SELECT realm INTO v_realm FROM "{schema}".meta;
    IF v_realm IS DISTINCT FROM p_realm THEN
        -- Its tokens cannot be compared with those of the realm that the caller opened (S9).
        RAISE EXCEPTION 'the data of this store was replaced since it was opened'
            USING ERRCODE = 'FL007', DETAIL = format('found=%s expected=%s', v_realm, p_realm);
    END IF;
    v_row := "{schema}".lock_row(p_name);
    v_now := clock_timestamp();
    v_live := ARRAY(SELECT h FROM unnest(v_row.holders) AS h WHERE h.expires > v_now);
    capacity := v_row.capacity;
    IF cardinality(v_live) > 0 AND v_row.capacity <> p_permits THEN
        outcome := 'capacity';
        RETURN;
    END IF;

    SELECT * INTO v_mine FROM unnest(v_live) AS h WHERE h.id = p_holder AND NOT h.released;
    IF FOUND THEN
        outcome := 'granted';
        token := v_mine.token;
        ttl_ms := p_ttl_ms;
        PERFORM "{schema}".extend(p_name, v_live, v_mine, p_ttl_ms, v_now);
        RETURN;
    END IF;

    IF cardinality(v_live) >= p_permits THEN
        outcome := 'held';
        SELECT floor(extract(epoch FROM min(h.expires) - v_now) * 1000000)
            INTO free_in_us FROM unnest(v_live) AS h;
        holder_info := (v_live[1]).info;
        RETURN;
    END IF;

    IF p_above IS NOT NULL THEN
        PERFORM "{schema}".check_jump(v_row.last_token, p_above);
    END IF;
    token := greatest(coalesce(v_row.last_token, 0), coalesce(p_above, 0));
    IF token >= 9223372036854775807 THEN
        RAISE EXCEPTION 'the fencing tokens of this name are used up'
            USING ERRCODE = 'FL004', DETAIL = format('last=%s', token);
    END IF;
    token := token + 1;
    outcome := 'granted';
    ttl_ms := p_ttl_ms;
    UPDATE "{schema}".locks AS l SET
        last_token = acquire.token,
        capacity = p_permits,
        holders = v_live || ROW(p_holder, acquire.token, p_ttl_ms,
            v_now + p_ttl_ms * interval '1 ms', false, p_info)::"{schema}".holder,
        busy_until = greatest(v_now + p_ttl_ms * interval '1 ms',
            (SELECT max(h.expires) FROM unnest(v_live) AS h))
    WHERE l.name = p_name;
END
$body$;

-- Gives one of the live holders a whole TTL from now on.
CREATE OR REPLACE FUNCTION "{schema}".extend(
    p_name bytea, p_live "{schema}".holder[], p_mine "{schema}".holder, p_ttl_ms bigint,
    p_now timestamptz
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_expires timestamptz := p_now + p_ttl_ms * interval '1 ms';
BEGIN
    PERFORM "{schema}".set_holders(p_name, ARRAY(
        SELECT CASE WHEN h.token = p_mine.token
            THEN ROW(h.id, h.token, p_ttl_ms, v_expires, false, h.info)::"{schema}".holder
            ELSE h END
        FROM unnest(p_live) AS h), p_now);
    IF v_expires < p_mine.expires THEN
        PERFORM "{schema}".wake(p_name);
    END IF;
END
$body$;

-- Extends leases, each if it is still good and still its holder's (L5). One answer for each, in
-- order: `renewed`, `lost`, or `busy` where another transaction has the row right now. A row that
-- somebody keeps locked must not cost the other leases of the batch.
CREATE OR REPLACE FUNCTION "{schema}".renew(
    p_names bytea[], p_holders bytea[], p_tokens bigint[], p_ttls_ms bigint[]
) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $body$
DECLARE
    v_answers text[] := array_fill('lost'::text, ARRAY[cardinality(p_names)]);
    v_i    integer;
    v_row  "{schema}".locks;
    v_now  timestamptz;
    v_live "{schema}".holder[];
    v_mine "{schema}".holder;
BEGIN
    PERFORM "{schema}".begin_change();
    FOR v_i IN SELECT i FROM generate_subscripts(p_names, 1) AS i ORDER BY p_names[i] LOOP
        SELECT * INTO v_row FROM "{schema}".locks WHERE name = p_names[v_i]
            FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            PERFORM 1 FROM "{schema}".locks WHERE name = p_names[v_i];
            IF FOUND THEN
                v_answers[v_i] := 'busy';
            END IF;
            CONTINUE;
        END IF;
        v_now := clock_timestamp();
        v_live := ARRAY(SELECT h FROM unnest(v_row.holders) AS h WHERE h.expires > v_now);
        SELECT * INTO v_mine FROM unnest(v_live) AS h
            WHERE h.id = p_holders[v_i] AND NOT h.released
                AND h.token = coalesce(p_tokens[v_i], h.token);
        IF FOUND THEN
            PERFORM "{schema}".extend(p_names[v_i], v_live, v_mine, p_ttls_ms[v_i], v_now);
            v_answers[v_i] := 'renewed';
        END IF;
    END LOOP;
    RETURN v_answers;
END
$body$;

-- Gives a grant up; true where it was there. With a linger time it stays that long, as nobody's.
CREATE OR REPLACE FUNCTION "{schema}".release(
    p_name bytea, p_holder bytea, p_token bigint, p_linger_us bigint
) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $body$
DECLARE
    v_row  "{schema}".locks;
    v_now  timestamptz;
    v_live "{schema}".holder[];
    v_mine "{schema}".holder;
BEGIN
    PERFORM "{schema}".begin_change();
    SELECT * INTO v_row FROM "{schema}".locks WHERE name = p_name FOR UPDATE;
    v_now := clock_timestamp();
    v_live := ARRAY(SELECT h FROM unnest(v_row.holders) AS h WHERE h.expires > v_now);
    SELECT * INTO v_mine FROM unnest(v_live) AS h
        WHERE h.id = p_holder AND NOT h.released AND h.token = coalesce(p_token, h.token);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM "{schema}".set_holders(p_name, ARRAY(
        SELECT CASE WHEN h.token = v_mine.token
            THEN ROW(h.id, h.token, h.ttl_ms, v_now + p_linger_us * interval '1 us', true,
                h.info)::"{schema}".holder
            ELSE h END
        FROM unnest(v_live) AS h
        WHERE h.token <> v_mine.token OR p_linger_us > 0), v_now);
    PERFORM "{schema}".wake(p_name);
    RETURN true;
END
$body$;

-- The present state of some locks: one row for each holder whose grant is good, or one row without
-- a holder. The holders' secrets stay here; the tag is what a fence shows of them.
CREATE OR REPLACE FUNCTION "{schema}".states(p_rows "{schema}".locks[]) RETURNS TABLE (
    name bytea, capacity integer, last_token bigint, token bigint, tag bytea, ttl_ms bigint,
    expires_in_us bigint, info bytea
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
        SELECT l.name, l.capacity, l.last_token, h.token, substr(sha256(h.id), 1, 16), h.ttl_ms,
            floor(extract(epoch FROM h.expires - v_now) * 1000000)::bigint, h.info
        FROM unnest(p_rows) AS l LEFT JOIN LATERAL unnest(l.holders) AS h ON h.expires > v_now
        ORDER BY l.name, h.token;
END
$body$;

-- The state of one lock.
CREATE OR REPLACE FUNCTION "{schema}".inspect(p_name bytea) RETURNS TABLE (
    name bytea, capacity integer, last_token bigint, token bigint, tag bytea, ttl_ms bigint,
    expires_in_us bigint, info bytea
)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $body$
    SELECT * FROM "{schema}".states(ARRAY(SELECT l FROM "{schema}".locks AS l WHERE l.name = p_name))
$body$;

-- The states of at most `p_limit` locks whose names begin with `p_prefix` and follow `p_after`.
CREATE OR REPLACE FUNCTION "{schema}".list(p_prefix bytea, p_after bytea, p_limit bigint)
RETURNS TABLE (
    name bytea, capacity integer, last_token bigint, token bigint, tag bytea, ttl_ms bigint,
    expires_in_us bigint, info bytea
)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $body$
    SELECT * FROM "{schema}".states(ARRAY(
        SELECT l FROM "{schema}".locks AS l
        WHERE l.name >= p_prefix AND substr(l.name, 1, octet_length(p_prefix)) = p_prefix
            AND (p_after IS NULL OR l.name > p_after)
        ORDER BY l.name LIMIT p_limit))
$body$;

-- Takes a lock from whoever holds it, and returns the state before.
CREATE OR REPLACE FUNCTION "{schema}".break_lock(p_name bytea) RETURNS TABLE (
    name bytea, capacity integer, last_token bigint, token bigint, tag bytea, ttl_ms bigint,
    expires_in_us bigint, info bytea
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $body$
DECLARE
    v_row "{schema}".locks;
    v_now timestamptz;
BEGIN
    PERFORM "{schema}".begin_change();
    SELECT * INTO v_row FROM "{schema}".locks AS l WHERE l.name = p_name FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_now := clock_timestamp();
    RETURN QUERY SELECT * FROM "{schema}".states(ARRAY[v_row]);
    IF EXISTS (SELECT FROM unnest(v_row.holders) AS h WHERE h.expires > v_now) THEN
        PERFORM "{schema}".set_holders(p_name, '{}', v_now);
    END IF;
    PERFORM "{schema}".wake(p_name);
END
$body$;

-- Makes the next token of a name larger than `p_floor`, and returns what the last one counts as.
CREATE OR REPLACE FUNCTION "{schema}".raise_floor(p_name bytea, p_floor bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $body$
DECLARE
    v_last bigint;
BEGIN
    PERFORM "{schema}".begin_change();
    v_last := ("{schema}".lock_row(p_name)).last_token;
    PERFORM "{schema}".check_jump(v_last, p_floor);
    v_last := greatest(coalesce(v_last, 0), p_floor);
    UPDATE "{schema}".locks SET last_token = v_last WHERE name = p_name;
    RETURN v_last;
END
$body$;

-- Removes at most `p_limit` records that nobody has held for `p_idle_us`, and returns how many. In
-- the same transaction their last tokens become the floor of all new names (L10).
CREATE OR REPLACE FUNCTION "{schema}".prune(p_idle_us bigint, p_limit bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $body$
DECLARE
    v_row     record;
    v_floor   bigint := 0;
    v_removed bigint := 0;
BEGIN
    PERFORM "{schema}".begin_change();
    FOR v_row IN
        SELECT name, last_token FROM "{schema}".locks
        WHERE busy_until <= clock_timestamp() - p_idle_us * interval '1 us'
        ORDER BY name LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM "{schema}".locks WHERE name = v_row.name;
        v_floor := greatest(v_floor, v_row.last_token);
        v_removed := v_removed + 1;
    END LOOP;
    UPDATE "{schema}".meta SET floor = v_floor WHERE floor < v_floor;
    RETURN v_removed;
END
$body$;
