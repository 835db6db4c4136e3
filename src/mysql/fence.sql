-- The storage half: a resource's watermark, checked and moved in the transaction of the write that
-- it guards (S2, S3). Any language can call `{prefix}_admit` and `{prefix}_admit_fence`.
--
-- Refusals are errors. An error does not end a transaction here: roll it back, and commit nothing.
DELIMITER //

-- The one rule, `token::judge`, for the fence row of a resource, which stays locked until the
-- caller's transaction ends. `p_intent` is `write`, `raise` or `rebind`. `p_applied` is 0 where this
-- very write was applied before (S7).
--
-- Nothing here reads without locking: under REPEATABLE READ such a read would show what was true
-- before the wait for the row, and would fix that view for the rest of the caller's transaction.
CREATE PROCEDURE `{prefix}_judge`(
    p_resource VARBINARY(512), p_token BIGINT UNSIGNED, p_holder VARBINARY(16), p_domain VARBINARY(512),
    p_seq BIGINT, p_intent VARCHAR(6) CHARACTER SET ascii,
    OUT p_applied INT, OUT p_mark BIGINT, OUT p_mark_holder VARBINARY(16), OUT p_mark_seq BIGINT,
    OUT p_mark_domain VARBINARY(512)
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_other_domain INT;
    DECLARE v_detail VARCHAR(128) CHARACTER SET utf8mb4;
    IF p_token IS NULL OR p_token < 1 OR p_token > 9223372036854775807 THEN
        CALL `{prefix}_refuse`('FL009', CONCAT(
            'fencing token is out of range; expected 1 to 9223372036854775807 token=',
            COALESCE(p_token, 'NULL')));
    END IF;
    IF p_resource IS NULL OR LENGTH(p_resource) = 0 THEN
        CALL `{prefix}_refuse`('FL009', 'no resource is named; expected 1 to 512 bytes');
    END IF;
    IF p_intent = 'rebind' AND p_domain IS NULL THEN
        CALL `{prefix}_refuse`('FL009', CONCAT(
            'a rebind needs the whole fence of a lock, not only its token token=', p_token));
    END IF;
    INSERT INTO `{prefix}_fences` (resource) VALUES (p_resource)
        ON DUPLICATE KEY UPDATE resource = p_resource;
    SELECT token, holder, seq, domain INTO p_mark, p_mark_holder, p_mark_seq, p_mark_domain
        FROM `{prefix}_fences` WHERE resource = p_resource FOR UPDATE;
    SET v_detail = CONCAT(' token=', p_token, ' watermark=', COALESCE(p_mark, 'none'));
    CALL `{prefix}_check_jump`(p_mark, p_token);
    -- No fence was admitted yet: the row is new.
    SET v_other_domain = COALESCE(p_mark_domain <> p_domain, 0);
    IF v_other_domain AND p_intent <> 'rebind' THEN
        CALL `{prefix}_refuse`('FL002', CONCAT('bound_to=', CONVERT(p_mark_domain USING utf8mb4),
            ' shown=', CONVERT(p_domain USING utf8mb4)));
    END IF;
    SET p_applied = 1;
    IF p_token < p_mark THEN
        CALL `{prefix}_refuse`('FL001', CONCAT('stale fencing token refused', v_detail));
    ELSEIF p_mark IS NULL OR p_token > p_mark THEN
        SET p_mark_domain = IF(p_intent = 'rebind', p_domain, COALESCE(p_mark_domain, p_domain));
        SET p_mark = p_token;
        SET p_mark_holder = p_holder;
        SET p_mark_seq = IF(p_intent = 'write', COALESCE(p_seq, 0), 0);
    ELSE
        IF v_other_domain THEN
            CALL `{prefix}_refuse`('FL001', CONCAT('a rebind needs a larger token than the watermark', v_detail));
        END IF;
        IF p_mark_holder <> p_holder THEN
            CALL `{prefix}_refuse`('FL001', CONCAT('an equal fencing token of another holder refused', v_detail));
        END IF;
        IF p_intent = 'write' AND p_seq < p_mark_seq THEN
            CALL `{prefix}_refuse`('FL001', CONCAT('a superseded write of the same holder refused', v_detail,
                ' seq=', p_seq, ' applied_seq=', p_mark_seq));
        END IF;
        SET p_applied = NOT COALESCE(p_intent = 'write' AND p_seq = p_mark_seq, 0);
        SET p_mark_holder = COALESCE(p_mark_holder, p_holder);
        SET p_mark_domain = COALESCE(p_mark_domain, p_domain);
        IF p_intent = 'write' THEN
            SET p_mark_seq = COALESCE(p_seq, p_mark_seq);
        END IF;
    END IF;
    UPDATE `{prefix}_fences`
        SET token = p_mark, holder = p_mark_holder, seq = p_mark_seq, domain = p_mark_domain
        WHERE resource = p_resource;
END
//

-- Refuses a caller whose lock on the fence row would end with the statement: where nothing is in
-- progress, the characteristics of the next transaction can be set, and otherwise not.
CREATE PROCEDURE `{prefix}_need_transaction`()
SQL SECURITY INVOKER
BEGIN
    DECLARE v_inside INT DEFAULT 0;
    IF @@SESSION.autocommit = 1 THEN
        BEGIN
            DECLARE CONTINUE HANDLER FOR 1568 SET v_inside = 1;
            SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
        END;
        IF NOT v_inside THEN
            CALL `{prefix}_refuse`('FL005', 'a check and its write are one transaction; START TRANSACTION first');
        END IF;
    END IF;
END
//

-- For any language: call it in the transaction of your write, before the write and before the reads
-- that it depends on. The more of the fence is shown, the more is checked.
CREATE PROCEDURE `{prefix}_admit`(p_resource VARCHAR(512) CHARACTER SET utf8mb4, p_token BIGINT UNSIGNED)
SQL SECURITY INVOKER
BEGIN
    CALL `{prefix}_admit_fence`(p_resource, p_token);
END
//

-- The same for the text form of a fence, as in the environment variable FENCELOCK_FENCE, or a token.
-- Sets @fencelock_applied to 0 where this very write (the same sequence) was made before: then leave
-- it out.
CREATE PROCEDURE `{prefix}_admit_fence`(
    p_resource VARCHAR(512) CHARACTER SET utf8mb4, p_fence VARCHAR(600) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
)
SQL SECURITY INVOKER
BEGIN
    SET @fencelock_applied = NULL;
    CALL `{prefix}_need_transaction`();
    CALL `{prefix}_judge_text`(CAST(p_resource AS BINARY), p_fence, @fencelock_applied);
END
//

-- A fence in its text form, taken apart and judged as a write.
CREATE PROCEDURE `{prefix}_judge_text`(
    p_resource VARBINARY(512), p_fence VARCHAR(600) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, OUT p_applied INT
)
SQL SECURITY INVOKER
BEGIN
    -- In a pattern, `$` is also before a line break at the end.
    DECLARE v_whole INT DEFAULT LOCATE('\n', p_fence) = 0;
    DECLARE v_rest VARCHAR(600) CHARACTER SET utf8mb4 DEFAULT p_fence;
    DECLARE v_token VARCHAR(600) CHARACTER SET utf8mb4;
    DECLARE v_holder VARCHAR(600) CHARACTER SET utf8mb4;
    DECLARE v_domain VARCHAR(600) CHARACTER SET utf8mb4;
    DECLARE v_seq VARCHAR(600) CHARACTER SET utf8mb4;
    DECLARE v_mark BIGINT;
    DECLARE v_mark_holder VARBINARY(16);
    DECLARE v_mark_seq BIGINT;
    DECLARE v_mark_domain VARBINARY(512);
    IF v_whole AND p_fence REGEXP '^[1-9][0-9]{0,18}$' THEN
        CALL `{prefix}_judge`(p_resource, p_fence, NULL, NULL, NULL, 'write',
            p_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain);
    ELSEIF v_whole AND p_fence REGEXP
        '^v1:[1-9][0-9]{0,18}:([0-9a-f]{32}|-):([-a-z0-9_=]+/[-a-z0-9_=]+/[-a-z0-9_=]+|-)(:[1-9][0-9]{0,17})?$'
    THEN
        SET v_token = SUBSTRING_INDEX(SUBSTRING_INDEX(v_rest, ':', 2), ':', -1);
        SET v_holder = NULLIF(SUBSTRING_INDEX(SUBSTRING_INDEX(v_rest, ':', 3), ':', -1), '-');
        SET v_domain = NULLIF(SUBSTRING_INDEX(SUBSTRING_INDEX(v_rest, ':', 4), ':', -1), '-');
        SET v_seq = IF(LENGTH(v_rest) - LENGTH(REPLACE(v_rest, ':', '')) = 4,
            SUBSTRING_INDEX(v_rest, ':', -1), NULL);
        CALL `{prefix}_judge`(p_resource, v_token, UNHEX(v_holder), CAST(v_domain AS BINARY), v_seq, 'write',
            p_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain);
    ELSE
        CALL `{prefix}_refuse`('FL009',
            'not a fence; expected a token, v1:TOKEN:HOLDER:DOMAIN or v1:TOKEN:HOLDER:DOMAIN:SEQ');
    END IF;
END
//

-- The same with all parts and an answer, for the library.
CREATE PROCEDURE `{prefix}_admit_parts`(
    p_resource VARBINARY(512), p_token BIGINT UNSIGNED, p_holder VARBINARY(16), p_domain VARBINARY(512),
    p_seq BIGINT
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_applied INT;
    DECLARE v_mark BIGINT;
    DECLARE v_mark_holder VARBINARY(16);
    DECLARE v_mark_seq BIGINT;
    DECLARE v_mark_domain VARBINARY(512);
    CALL `{prefix}_need_transaction`();
    CALL `{prefix}_judge`(p_resource, p_token, p_holder, p_domain, p_seq, 'write',
        v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain);
    SELECT v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain;
END
//

-- What the triggers of a guarded table call: a statement that changes it has to come from a session
-- that shows a fence, by `SET @fencelock_fence = '...'`, and is refused where that is stale. Many
-- rows and statements may belong to one fence, so a sequence in it is not looked at.
CREATE PROCEDURE `{prefix}_guard`(p_resource VARBINARY(512))
SQL SECURITY INVOKER
BEGIN
    DECLARE v_fence VARCHAR(600) CHARACTER SET utf8mb4 DEFAULT @fencelock_fence;
    DECLARE v_applied INT;
    IF COALESCE(v_fence, '') = '' THEN
        CALL `{prefix}_refuse`('FL009', 'the table is guarded and no fence was shown; SET @fencelock_fence first');
    END IF;
    IF v_fence LIKE 'v1:%' THEN
        SET v_fence = SUBSTRING_INDEX(v_fence, ':', 4);
    END IF;
    CALL `{prefix}_judge_text`(p_resource, v_fence, v_applied);
END
//

-- The values of the command line: each change is one call.
CREATE PROCEDURE `{prefix}_put`(
    p_resource VARBINARY(512), p_value LONGBLOB, p_token BIGINT UNSIGNED, p_holder VARBINARY(16),
    p_domain VARBINARY(512), p_seq BIGINT
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_applied INT;
    DECLARE v_mark BIGINT;
    DECLARE v_mark_holder VARBINARY(16);
    DECLARE v_mark_seq BIGINT;
    DECLARE v_mark_domain VARBINARY(512);
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL `{prefix}_judge`(p_resource, p_token, p_holder, p_domain, p_seq, 'write',
        v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain);
    IF v_applied THEN
        INSERT INTO `{prefix}_values` (resource, value, writer) VALUES (p_resource, p_value, p_token)
            ON DUPLICATE KEY UPDATE value = p_value, writer = p_token;
    END IF;
    COMMIT;
    SELECT v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain;
END
//

CREATE PROCEDURE `{prefix}_delete`(
    p_resource VARBINARY(512), p_token BIGINT UNSIGNED, p_holder VARBINARY(16),
    p_domain VARBINARY(512), p_seq BIGINT
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_applied INT;
    DECLARE v_mark BIGINT;
    DECLARE v_mark_holder VARBINARY(16);
    DECLARE v_mark_seq BIGINT;
    DECLARE v_mark_domain VARBINARY(512);
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL `{prefix}_judge`(p_resource, p_token, p_holder, p_domain, p_seq, 'write',
        v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain);
    IF v_applied THEN
        DELETE FROM `{prefix}_values` WHERE resource = p_resource;
    END IF;
    COMMIT;
    SELECT v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain;
END
//

CREATE PROCEDURE `{prefix}_rebind`(
    p_resource VARBINARY(512), p_token BIGINT UNSIGNED, p_holder VARBINARY(16), p_domain VARBINARY(512)
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_applied INT;
    DECLARE v_mark BIGINT;
    DECLARE v_mark_holder VARBINARY(16);
    DECLARE v_mark_seq BIGINT;
    DECLARE v_mark_domain VARBINARY(512);
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL `{prefix}_judge`(p_resource, p_token, p_holder, p_domain, NULL, 'rebind',
        v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain);
    COMMIT;
    SELECT v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain;
END
//

-- Moves the watermark up and reads the value in one step (S5, S6).
CREATE PROCEDURE `{prefix}_raise`(
    p_resource VARBINARY(512), p_token BIGINT UNSIGNED, p_holder VARBINARY(16), p_domain VARBINARY(512)
)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_applied INT;
    DECLARE v_mark BIGINT;
    DECLARE v_mark_holder VARBINARY(16);
    DECLARE v_mark_seq BIGINT;
    DECLARE v_mark_domain VARBINARY(512);
    DECLARE v_value LONGBLOB;
    DECLARE v_writer BIGINT;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    CALL `{prefix}_judge`(p_resource, p_token, p_holder, p_domain, NULL, 'raise',
        v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain);
    SELECT value, writer INTO v_value, v_writer FROM `{prefix}_values` WHERE resource = p_resource;
    COMMIT;
    SELECT v_applied, v_mark, v_mark_holder, v_mark_seq, v_mark_domain, v_value, v_writer;
END
//

-- Value, watermark and writer, as one statement saw them.
CREATE PROCEDURE `{prefix}_get`(p_resource VARBINARY(512))
SQL SECURITY INVOKER
BEGIN
    SELECT NULL, f.token, f.holder, f.seq, f.domain, v.value, v.writer
        FROM `{prefix}_fences` AS f LEFT JOIN `{prefix}_values` AS v ON v.resource = f.resource
        WHERE f.resource = p_resource;
END
//
