-- What each operation on a lock does: each one call, which is one transaction and one answer.
--
-- Each locks the row of the name first and reads the clock afterwards. The isolation level is set
-- for each transaction: under READ COMMITTED a statement sees what was committed before it, and a
-- name that is not there locks no gap, so that two first users cannot meet in a deadlock.
DELIMITER //

-- The row of a lock, locked; made where there was none.
CREATE PROCEDURE `{prefix}_lock_row`(p_name VARBINARY(512), OUT p_last BIGINT, OUT p_capacity INT)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_known INT;
    SELECT COUNT(*), MAX(last_token), MAX(capacity) INTO v_known, p_last, p_capacity
        FROM `{prefix}_locks` WHERE name = p_name FOR UPDATE;
    IF v_known = 0 THEN
        INSERT INTO `{prefix}_locks` (name, changed_us) VALUES (p_name, 0)
            ON DUPLICATE KEY UPDATE name = p_name;
        SELECT MAX(last_token), MAX(capacity) INTO p_last, p_capacity
            FROM `{prefix}_locks` WHERE name = p_name FOR UPDATE;
    END IF;
    IF p_last IS NULL THEN
        -- Read only now: if the name was pruned while we waited, the floor knows its last token.
        SELECT NULLIF(floor, 0) INTO p_last FROM `{prefix}_meta`;
    END IF;
END
//

-- Grants a permit with a new token, finds the grant of the same holder again (L7), or says who
-- holds the lock. `outcome` is `granted`, `held` or `capacity`.
CREATE PROCEDURE `{prefix}_acquire`(
    p_realm VARBINARY(32), p_name VARBINARY(512), p_holder VARBINARY(16), p_ttl_ms BIGINT,
    p_permits INT, p_above BIGINT, p_info BLOB
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_outcome VARCHAR(8) CHARACTER SET ascii;
    DECLARE v_realm VARBINARY(32);
    DECLARE v_last BIGINT;
    DECLARE v_capacity INT;
    DECLARE v_now_us BIGINT;
    DECLARE v_live INT;
    DECLARE v_first_us BIGINT;
    DECLARE v_token BIGINT;
    DECLARE v_info BLOB;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    SELECT realm INTO v_realm FROM `{prefix}_meta`;
    IF NOT (v_realm <=> p_realm) THEN
        -- Its tokens cannot be compared with those of the realm that the caller opened (S9).
        CALL `{prefix}_refuse`('FL007', CONCAT('the data of this store was replaced since it was opened found=',
            CONVERT(COALESCE(v_realm, 'none') USING utf8mb4)));
    END IF;
    CALL `{prefix}_lock_row`(p_name, v_last, v_capacity);
    CALL `{prefix}_clock`(v_now_us);
    DELETE FROM `{prefix}_holders` WHERE name = p_name AND expires_us <= v_now_us;
    SELECT COUNT(*), MIN(expires_us), MAX(CASE WHEN id = p_holder AND released = 0 THEN token END)
        INTO v_live, v_first_us, v_token
        FROM `{prefix}_holders` WHERE name = p_name;
    IF v_live > 0 AND v_capacity <> p_permits THEN
        SET v_outcome = 'capacity', v_token = NULL;
    ELSEIF v_token IS NOT NULL THEN
        SET v_outcome = 'granted';
        UPDATE `{prefix}_holders` SET ttl_ms = p_ttl_ms, expires_us = v_now_us + p_ttl_ms * 1000
            WHERE name = p_name AND token = v_token;
    ELSEIF v_live >= p_permits THEN
        SET v_outcome = 'held';
        SELECT info INTO v_info FROM `{prefix}_holders` WHERE name = p_name ORDER BY token LIMIT 1;
    ELSE
        IF p_above IS NOT NULL THEN
            CALL `{prefix}_check_jump`(v_last, p_above);
        END IF;
        SET v_token = GREATEST(COALESCE(v_last, 0), COALESCE(p_above, 0));
        IF v_token >= 9223372036854775807 THEN
            CALL `{prefix}_refuse`('FL004', CONCAT('the fencing tokens of this name are used up last=', v_token));
        END IF;
        SET v_outcome = 'granted', v_token = v_token + 1, v_capacity = p_permits;
        UPDATE `{prefix}_locks` SET last_token = v_token, capacity = p_permits, changed_us = v_now_us
            WHERE name = p_name;
        INSERT INTO `{prefix}_holders` (name, token, id, ttl_ms, expires_us, released, info)
            VALUES (p_name, v_token, p_holder, p_ttl_ms, v_now_us + p_ttl_ms * 1000, 0, p_info);
    END IF;
    COMMIT;
    SELECT v_outcome, v_token, p_ttl_ms, v_capacity, v_first_us - v_now_us, v_info;
END
//

-- Extends leases, each if it is still good and still its holder's (L5). The batch is, for each lease
-- in the order of names: the length of the name in 2 bytes, the name, the holder in 16, the token in
-- 8 (0 for whatever grant the holder has) and the TTL in milliseconds in 8, most significant first.
-- The answer has a letter for each: `r` for renewed, `l` for lost, `b` where another transaction has
-- the row right now, which must not cost the other leases of the batch.
CREATE PROCEDURE `{prefix}_renew`(p_batch LONGBLOB)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_answers LONGTEXT CHARACTER SET ascii DEFAULT '';
    DECLARE v_at INT DEFAULT 1;
    DECLARE v_length INT;
    DECLARE v_name VARBINARY(512);
    DECLARE v_holder VARBINARY(16);
    DECLARE v_token BIGINT;
    DECLARE v_ttl_ms BIGINT;
    DECLARE v_known INT;
    DECLARE v_now_us BIGINT;
    DECLARE v_mine BIGINT;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    WHILE v_at < LENGTH(p_batch) DO
        SET v_length = CONV(HEX(SUBSTRING(p_batch, v_at, 2)), 16, 10);
        SET v_name = SUBSTRING(p_batch, v_at + 2, v_length);
        SET v_at = v_at + 2 + v_length;
        SET v_holder = SUBSTRING(p_batch, v_at, 16);
        SET v_token = CONV(HEX(SUBSTRING(p_batch, v_at + 16, 8)), 16, 10);
        SET v_ttl_ms = CONV(HEX(SUBSTRING(p_batch, v_at + 24, 8)), 16, 10);
        SET v_at = v_at + 32;
        SELECT COUNT(*) INTO v_known FROM `{prefix}_locks` WHERE name = v_name FOR UPDATE SKIP LOCKED;
        IF v_known = 0 THEN
            SELECT COUNT(*) INTO v_known FROM `{prefix}_locks` WHERE name = v_name;
            SET v_answers = CONCAT(v_answers, IF(v_known > 0, 'b', 'l'));
        ELSE
            CALL `{prefix}_clock`(v_now_us);
            CALL `{prefix}_find`(v_name, v_holder, NULLIF(v_token, 0), v_now_us, v_mine);
            IF v_mine IS NOT NULL THEN
                UPDATE `{prefix}_holders` SET ttl_ms = v_ttl_ms, expires_us = v_now_us + v_ttl_ms * 1000
                    WHERE name = v_name AND token = v_mine;
            END IF;
            SET v_answers = CONCAT(v_answers, IF(v_mine IS NULL, 'l', 'r'));
        END IF;
    END WHILE;
    COMMIT;
    SELECT v_answers;
END
//

-- The token of a grant that is good and this holder's; NULL where there is none.
CREATE PROCEDURE `{prefix}_find`(
    p_name VARBINARY(512), p_holder VARBINARY(16), p_token BIGINT, p_now_us BIGINT, OUT p_found BIGINT
)
SQL SECURITY INVOKER
BEGIN
    SELECT MAX(token) INTO p_found FROM `{prefix}_holders`
        WHERE name = p_name AND id = p_holder AND token = COALESCE(p_token, token)
            AND released = 0 AND expires_us > p_now_us;
END
//

-- Gives a grant up; 1 where it was there. With a linger time it stays that long, as nobody's.
CREATE PROCEDURE `{prefix}_release`(
    p_name VARBINARY(512), p_holder VARBINARY(16), p_token BIGINT, p_linger_us BIGINT
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_known INT;
    DECLARE v_now_us BIGINT;
    DECLARE v_mine BIGINT;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    SELECT COUNT(*) INTO v_known FROM `{prefix}_locks` WHERE name = p_name FOR UPDATE;
    IF v_known > 0 THEN
        CALL `{prefix}_clock`(v_now_us);
        CALL `{prefix}_find`(p_name, p_holder, p_token, v_now_us, v_mine);
    END IF;
    IF v_mine IS NOT NULL THEN
        IF p_linger_us > 0 THEN
            UPDATE `{prefix}_holders` SET released = 1, expires_us = v_now_us + p_linger_us
                WHERE name = p_name AND token = v_mine;
        ELSE
            DELETE FROM `{prefix}_holders` WHERE name = p_name AND token = v_mine;
        END IF;
        UPDATE `{prefix}_locks` SET changed_us = v_now_us WHERE name = p_name;
    END IF;
    COMMIT;
    SELECT v_mine IS NOT NULL;
END
//

-- The present state of a lock: one row for each holder whose grant is good, or one row without a
-- holder. The holders' secrets stay here; the tag is what a fence shows of them.
CREATE PROCEDURE `{prefix}_inspect`(p_name VARBINARY(512))
SQL SECURITY INVOKER
BEGIN
    DECLARE v_now_us BIGINT;
    CALL `{prefix}_clock`(v_now_us);
    SELECT l.name, l.capacity, l.last_token, h.token, UNHEX(LEFT(SHA2(h.id, 256), 32)), h.ttl_ms,
            h.expires_us - v_now_us, h.info
        FROM `{prefix}_locks` AS l
            LEFT JOIN `{prefix}_holders` AS h ON h.name = l.name AND h.expires_us > v_now_us
        WHERE l.name = p_name
        ORDER BY h.token;
END
//

-- The states of at most `p_limit` locks whose names begin with `p_prefix` and follow `p_after`.
CREATE PROCEDURE `{prefix}_list`(p_prefix VARBINARY(512), p_after VARBINARY(512), p_limit BIGINT)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_now_us BIGINT;
    CALL `{prefix}_clock`(v_now_us);
    SELECT l.name, l.capacity, l.last_token, h.token, UNHEX(LEFT(SHA2(h.id, 256), 32)), h.ttl_ms,
            h.expires_us - v_now_us, h.info
        FROM (
            SELECT name, capacity, last_token FROM `{prefix}_locks`
            WHERE name >= p_prefix AND LEFT(name, LENGTH(p_prefix)) = p_prefix
                AND (p_after IS NULL OR name > p_after)
            ORDER BY name LIMIT p_limit
        ) AS l
            LEFT JOIN `{prefix}_holders` AS h ON h.name = l.name AND h.expires_us > v_now_us
        ORDER BY l.name, h.token;
END
//

-- Takes a lock from whoever holds it, and returns the state before.
CREATE PROCEDURE `{prefix}_break_lock`(p_name VARBINARY(512))
SQL SECURITY INVOKER
BEGIN
    DECLARE v_known INT;
    DECLARE v_now_us BIGINT;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    SELECT COUNT(*) INTO v_known FROM `{prefix}_locks` WHERE name = p_name FOR UPDATE;
    CALL `{prefix}_inspect`(p_name);
    IF v_known > 0 THEN
        CALL `{prefix}_clock`(v_now_us);
        DELETE FROM `{prefix}_holders` WHERE name = p_name;
        UPDATE `{prefix}_locks` SET changed_us = v_now_us WHERE name = p_name;
    END IF;
    COMMIT;
END
//

-- Makes the next token of a name larger than `p_floor`, and returns what the last one counts as.
CREATE PROCEDURE `{prefix}_raise_floor`(p_name VARBINARY(512), p_floor BIGINT)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_last BIGINT;
    DECLARE v_capacity INT;
    DECLARE v_now_us BIGINT;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL `{prefix}_lock_row`(p_name, v_last, v_capacity);
    CALL `{prefix}_check_jump`(v_last, p_floor);
    CALL `{prefix}_clock`(v_now_us);
    SET v_last = GREATEST(COALESCE(v_last, 0), p_floor);
    UPDATE `{prefix}_locks` SET last_token = v_last, changed_us = v_now_us WHERE name = p_name;
    COMMIT;
    SELECT v_last;
END
//

-- Removes at most `p_limit` records that nobody has held for `p_idle_us`, and says how many, and how
-- many there are. In the same transaction their last tokens become the floor of all new names (L10).
CREATE PROCEDURE `{prefix}_prune`(p_idle_us BIGINT, p_limit BIGINT)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_now_us BIGINT;
    DECLARE v_name VARBINARY(512) DEFAULT '';
    DECLARE v_before VARBINARY(512);
    DECLARE v_last BIGINT;
    DECLARE v_held INT;
    DECLARE v_floor BIGINT DEFAULT 0;
    DECLARE v_removed BIGINT DEFAULT 0;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL `{prefix}_clock`(v_now_us);
    WHILE v_name IS NOT NULL AND v_removed < p_limit DO
        SET v_before = v_name, v_name = NULL;
        SELECT name, last_token INTO v_name, v_last FROM `{prefix}_locks` AS l
            WHERE name > v_before AND changed_us <= v_now_us - p_idle_us
                AND NOT EXISTS (
                    SELECT 1 FROM `{prefix}_holders` AS h
                    WHERE h.name = l.name AND h.expires_us > v_now_us - p_idle_us
                )
            ORDER BY name LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF v_name IS NOT NULL THEN
            -- Again, now that the row is ours: the subquery may have looked before.
            SELECT COUNT(*) INTO v_held FROM `{prefix}_holders`
                WHERE name = v_name AND expires_us > v_now_us - p_idle_us;
            IF v_held = 0 THEN
                DELETE FROM `{prefix}_holders` WHERE name = v_name;
                DELETE FROM `{prefix}_locks` WHERE name = v_name;
                SET v_floor = GREATEST(v_floor, COALESCE(v_last, 0)), v_removed = v_removed + 1;
            END IF;
        END IF;
    END WHILE;
    UPDATE `{prefix}_meta` SET floor = v_floor WHERE floor < v_floor;
    COMMIT;
    SELECT v_removed, (SELECT COUNT(*) FROM `{prefix}_locks`);
END
//
