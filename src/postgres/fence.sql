-- The storage half: a resource's watermark, checked and moved in the transaction of the write that
-- it guards (S2, S3). Any language can call `admit` and `admit_fence`.
--
-- Refusals are errors, so that the caller's transaction cannot commit by oversight:
--   FL001  fenced: the token is stale (DETAIL has token and watermark)
--   FL002  the resource is bound to another lock
--   FL003  the token is implausibly far ahead
--   FL009  no fence, or a malformed one, was shown

-- The one rule, `token::judge`, for the fence row of a resource, which stays locked until the
-- caller's transaction ends. `p_intent` is `write`, `raise` or `rebind`. `applied` is false where
-- this very write was applied before (S7).
CREATE OR REPLACE FUNCTION "{schema}".judge(
    p_resource bytea, p_token bigint, p_holder bytea, p_domain text, p_seq bigint, p_intent text,
    OUT applied boolean, OUT fence "{schema}".fences
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_other_domain boolean;
    v_detail       text;
BEGIN
    IF p_token IS NULL OR p_token < 1 THEN
        RAISE EXCEPTION 'fencing token is out of range; expected 1 to 9223372036854775807'
            USING ERRCODE = 'FL009', DETAIL = format('token=%s', p_token);
    END IF;
    IF p_intent = 'rebind' AND p_domain IS NULL THEN
        RAISE EXCEPTION 'a rebind needs the whole fence of a lock, not only its token'
            USING ERRCODE = 'FL009', DETAIL = format('token=%s', p_token);
    END IF;
    LOOP
        SELECT * INTO fence FROM "{schema}".fences WHERE resource = p_resource FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO "{schema}".fences (resource) VALUES (p_resource) ON CONFLICT DO NOTHING;
    END LOOP;
    v_detail := format('token=%s watermark=%s', p_token, fence.token);
    PERFORM "{schema}".check_jump(fence.token, p_token);
    -- No fence was admitted yet: the row is new.
    v_other_domain := coalesce(fence.domain <> p_domain, false);
    IF v_other_domain AND p_intent <> 'rebind' THEN
        RAISE EXCEPTION 'the resource is bound to another lock; use that lock, or rebind the resource'
            USING ERRCODE = 'FL002',
                DETAIL = format('bound_to=%s shown=%s', fence.domain, p_domain);
    END IF;
    applied := true;
    IF p_token < fence.token THEN
        RAISE EXCEPTION 'stale fencing token refused' USING ERRCODE = 'FL001', DETAIL = v_detail;
    ELSIF fence.token IS NULL OR p_token > fence.token THEN
        fence.domain := CASE WHEN p_intent = 'rebind' THEN p_domain
            ELSE coalesce(fence.domain, p_domain) END;
        fence.token := p_token;
        fence.holder := p_holder;
        fence.seq := CASE WHEN p_intent = 'write' THEN coalesce(p_seq, 0) ELSE 0 END;
    ELSE
        IF v_other_domain THEN
            RAISE EXCEPTION 'a rebind needs a larger token than the watermark'
                USING ERRCODE = 'FL001', DETAIL = v_detail;
        END IF;
        IF fence.holder <> p_holder THEN
            RAISE EXCEPTION 'an equal fencing token of another holder refused'
                USING ERRCODE = 'FL001', DETAIL = v_detail;
        END IF;
        IF p_intent = 'write' AND p_seq < fence.seq THEN
            RAISE EXCEPTION 'a write that the same holder has already superseded refused'
                USING ERRCODE = 'FL001',
                    DETAIL = format('%s seq=%s applied_seq=%s', v_detail, p_seq, fence.seq);
        END IF;
        applied := NOT coalesce(p_intent = 'write' AND p_seq = fence.seq, false);
        fence.holder := coalesce(fence.holder, p_holder);
        fence.domain := coalesce(fence.domain, p_domain);
        IF p_intent = 'write' THEN
            fence.seq := coalesce(p_seq, fence.seq);
        END IF;
    END IF;
    UPDATE "{schema}".fences AS f SET
        token = (judge.fence).token, holder = (judge.fence).holder,
        seq = (judge.fence).seq, domain = (judge.fence).domain
    WHERE f.resource = p_resource;
END
$body$;

-- For any language: call it in the transaction of your write, before the write. Only the number is
-- needed; the more of the fence is shown, the more is checked. Returns true where the write is to be
-- made, and false where this very write (the same `seq`) was made before: then leave it out.
CREATE OR REPLACE FUNCTION "{schema}".admit(
    resource text, token bigint, holder text DEFAULT NULL, domain text DEFAULT NULL,
    seq bigint DEFAULT NULL
) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $body$
    SELECT (j).applied FROM "{schema}".judge(
        convert_to(resource, 'UTF8'), token, decode(holder, 'hex'), domain, seq, 'write') AS j
$body$;

-- The same for the text form of a fence, as in the environment variable FENCELOCK_FENCE.
CREATE OR REPLACE FUNCTION "{schema}".admit_fence(resource text, fence text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_part text[] := regexp_match(coalesce(fence, ''),
        '^v1:([1-9][0-9]{0,18}):([0-9a-f]{32}|-):([a-z0-9_=-]+/[a-z0-9_=-]+/[a-z0-9_=-]+|-)(?::([1-9][0-9]{0,18}))?$');
BEGIN
    IF v_part IS NULL AND fence ~ '^[1-9][0-9]{0,18}$' THEN
        RETURN "{schema}".admit(resource, fence::bigint);
    END IF;
    IF v_part IS NULL THEN
        RAISE EXCEPTION 'not a fence; expected a token, v1:TOKEN:HOLDER:DOMAIN or v1:TOKEN:HOLDER:DOMAIN:SEQ'
            USING ERRCODE = 'FL009';
    END IF;
    RETURN "{schema}".admit(resource, v_part[1]::bigint, nullif(v_part[2], '-'),
        nullif(v_part[3], '-'), v_part[4]::bigint);
END
$body$;

-- A trigger that guards a whole table: a statement that changes it has to come from a session that
-- shows a fence, by `SET fencelock.fence = '...'`, and is refused where that is stale. The argument is the
-- resource. Many statements may belong to one fence, so a sequence in it is not looked at.
CREATE OR REPLACE FUNCTION "{schema}".guard() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_fence text := coalesce(current_setting('fencelock.fence', true), '');
BEGIN
    IF v_fence = '' THEN
        RAISE EXCEPTION 'the table is guarded and no fence was shown'
            USING ERRCODE = 'FL009', DETAIL = format('table=%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME),
                HINT = 'SET fencelock.fence to the token or the fence of the lock that guards it.';
    END IF;
    PERFORM "{schema}".admit_fence(TG_ARGV[0], regexp_replace(v_fence,
        '^(v1:[^:]*:[^:]*:[^:]*):[0-9]+$', E'\\1'));
    RETURN NULL;
END
$body$;

-- The values of the command line: each change is one call.
CREATE OR REPLACE FUNCTION "{schema}".put(
    p_resource bytea, p_value bytea, p_token bigint, p_holder bytea, p_domain text, p_seq bigint,
    OUT applied boolean, OUT token bigint, OUT holder bytea, OUT seq bigint, OUT domain text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '3s' AS $body$
DECLARE
    v_fence "{schema}".fences;
BEGIN
    PERFORM "{schema}".be_durable();
    SELECT j.applied, (j.fence).* INTO applied, v_fence.resource, token, holder, seq, domain
        FROM "{schema}".judge(p_resource, p_token, p_holder, p_domain, p_seq, 'write') AS j;
    IF applied THEN
        INSERT INTO "{schema}".kv AS kv (resource, value, writer)
            VALUES (p_resource, p_value, p_token)
            ON CONFLICT (resource) DO UPDATE SET value = EXCLUDED.value, writer = EXCLUDED.writer;
    END IF;
END
$body$;

CREATE OR REPLACE FUNCTION "{schema}".delete(
    p_resource bytea, p_token bigint, p_holder bytea, p_domain text, p_seq bigint,
    OUT applied boolean, OUT token bigint, OUT holder bytea, OUT seq bigint, OUT domain text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '3s' AS $body$
DECLARE
    v_fence "{schema}".fences;
BEGIN
    PERFORM "{schema}".be_durable();
    SELECT j.applied, (j.fence).* INTO applied, v_fence.resource, token, holder, seq, domain
        FROM "{schema}".judge(p_resource, p_token, p_holder, p_domain, p_seq, 'write') AS j;
    IF applied THEN
        DELETE FROM "{schema}".kv AS kv WHERE kv.resource = p_resource;
    END IF;
END
$body$;

CREATE OR REPLACE FUNCTION "{schema}".rebind(
    p_resource bytea, p_token bigint, p_holder bytea, p_domain text,
    OUT applied boolean, OUT token bigint, OUT holder bytea, OUT seq bigint, OUT domain text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '3s' AS $body$
DECLARE
    v_fence "{schema}".fences;
BEGIN
    PERFORM "{schema}".be_durable();
    SELECT j.applied, (j.fence).* INTO applied, v_fence.resource, token, holder, seq, domain
        FROM "{schema}".judge(p_resource, p_token, p_holder, p_domain, NULL, 'rebind') AS j;
END
$body$;

-- Moves the watermark up and reads the value in one step (S5, S6).
CREATE OR REPLACE FUNCTION "{schema}".raise(
    p_resource bytea, p_token bigint, p_holder bytea, p_domain text,
    OUT token bigint, OUT holder bytea, OUT seq bigint, OUT domain text,
    OUT value bytea, OUT writer bigint
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '3s' AS $body$
DECLARE
    v_fence "{schema}".fences;
BEGIN
    PERFORM "{schema}".be_durable();
    SELECT (j.fence).* INTO v_fence.resource, token, holder, seq, domain
        FROM "{schema}".judge(p_resource, p_token, p_holder, p_domain, NULL, 'raise') AS j;
    SELECT kv.value, kv.writer INTO value, writer FROM "{schema}".kv AS kv
        WHERE kv.resource = p_resource;
END
$body$;

-- Value, watermark and writer, as one statement saw them.
CREATE OR REPLACE FUNCTION "{schema}".get(
    p_resource bytea,
    OUT token bigint, OUT holder bytea, OUT seq bigint, OUT domain text,
    OUT value bytea, OUT writer bigint
) RETURNS SETOF record
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $body$
    SELECT f.token, f.holder, f.seq, f.domain, kv.value, kv.writer
    FROM "{schema}".fences AS f LEFT JOIN "{schema}".kv AS kv USING (resource)
    WHERE f.resource = p_resource
$body$;
