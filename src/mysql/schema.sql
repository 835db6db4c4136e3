-- The tables of fencelock, and what all its procedures share. Run it as often as you like: it
-- creates what is missing and replaces procedures, and leaves data as it is.
--
-- Times are microseconds since the Unix epoch by this server's clock: numbers know no time zone.
-- Names are bytes: no collation makes two of them one. The engine is named, for only InnoDB has
-- transactions and locks of single rows on both MySQL and MariaDB.
DELIMITER //

-- A procedure keeps the mode that it was made in.
SET @fencelock_sql_mode = @@SESSION.sql_mode
//
SET SESSION sql_mode = 'STRICT_TRANS_TABLES,STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'
//

-- Says why a request is refused. SQLSTATE is what programs look at:
--   FL001  fenced: the token is stale (the text has token and watermark)
--   FL002  the resource is bound to another lock
--   FL003  the token is implausibly far ahead
--   FL004  the tokens of a name are used up
--   FL005  the connection or the statement around the call is not as it has to be
--   FL006  the tables are of another version of fencelock
--   FL007  the data was replaced since the store was opened
--   FL009  no fence, or a malformed one, was shown
CREATE PROCEDURE `{prefix}_refuse`(p_state VARCHAR(5) CHARACTER SET ascii, p_text TEXT CHARACTER SET utf8mb4)
SQL SECURITY INVOKER
BEGIN
    -- The longest that both servers take.
    DECLARE v_text VARCHAR(128) CHARACTER SET utf8mb4 DEFAULT LEFT(p_text, 128);
    CASE p_state
        WHEN 'FL001' THEN SIGNAL SQLSTATE 'FL001' SET MESSAGE_TEXT = v_text;
        WHEN 'FL002' THEN SIGNAL SQLSTATE 'FL002' SET MESSAGE_TEXT = v_text;
        WHEN 'FL003' THEN SIGNAL SQLSTATE 'FL003' SET MESSAGE_TEXT = v_text;
        WHEN 'FL004' THEN SIGNAL SQLSTATE 'FL004' SET MESSAGE_TEXT = v_text;
        WHEN 'FL005' THEN SIGNAL SQLSTATE 'FL005' SET MESSAGE_TEXT = v_text;
        WHEN 'FL006' THEN SIGNAL SQLSTATE 'FL006' SET MESSAGE_TEXT = v_text;
        WHEN 'FL007' THEN SIGNAL SQLSTATE 'FL007' SET MESSAGE_TEXT = v_text;
        ELSE SIGNAL SQLSTATE 'FL009' SET MESSAGE_TEXT = v_text;
    END CASE;
END
//

-- One row: the identity of this data, the layout's version, and the floor of new names.
CREATE TABLE IF NOT EXISTS `{prefix}_meta` (
    one     TINYINT NOT NULL PRIMARY KEY,
    version INT NOT NULL,
    realm   VARBINARY(32) NOT NULL,
    -- At least the last token of every name that was pruned, so that no token goes down (L10).
    floor   BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB
//

-- One row for each lock name: whatever happens to a lock happens while this row is locked. A
-- release leaves it, and with it the last token (L10).
CREATE TABLE IF NOT EXISTS `{prefix}_locks` (
    name       VARBINARY(512) NOT NULL PRIMARY KEY,
    last_token BIGINT,
    capacity   INT,
    -- When it was last granted, given up or broken.
    changed_us BIGINT NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC
//

-- The grants of a lock. Those whose time is over count as gone, and go with the next grant.
CREATE TABLE IF NOT EXISTS `{prefix}_holders` (
    name       VARBINARY(512) NOT NULL,
    token      BIGINT NOT NULL,
    id         VARBINARY(16) NOT NULL,    -- the holder's secret
    ttl_ms     BIGINT NOT NULL,
    expires_us BIGINT NOT NULL,
    released   TINYINT NOT NULL,          -- given up with a linger time: keeps others out, and is nobody's
    info       BLOB NOT NULL,             -- JSON for people; decides nothing
    PRIMARY KEY (name, token)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC
//

-- One row for each fenced resource: its watermark. Never deleted (S1).
CREATE TABLE IF NOT EXISTS `{prefix}_fences` (
    resource VARBINARY(512) NOT NULL PRIMARY KEY,
    token    BIGINT,
    holder   VARBINARY(16),
    seq      BIGINT NOT NULL DEFAULT 0,
    domain   VARBINARY(512)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC
//

-- The values of the command line's `put` and `get`.
CREATE TABLE IF NOT EXISTS `{prefix}_values` (
    resource VARBINARY(512) NOT NULL PRIMARY KEY,
    value    LONGBLOB NOT NULL,
    writer   BIGINT NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC
//

-- The server's clock as it is now. SYSDATE(), for NOW() is the beginning of a statement and stale
-- after a wait for a row. It follows the session's time zone, in which an hour can come twice: so it
-- is read in UTC, whatever the session has.
CREATE PROCEDURE `{prefix}_clock`(OUT p_now_us BIGINT)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_zone VARCHAR(64) CHARACTER SET utf8mb4 DEFAULT @@SESSION.time_zone;
    SET SESSION time_zone = '+00:00';
    SET p_now_us = TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', SYSDATE(6));
    SET SESSION time_zone = v_zone;
END
//

-- Refuses a token above both `last + 2^32` and the present time in microseconds plus one day (S11).
-- A lock wait does not matter to a bound of a day, so UTC_TIMESTAMP() is good enough here.
CREATE PROCEDURE `{prefix}_check_jump`(p_last BIGINT, p_token BIGINT UNSIGNED)
SQL SECURITY INVOKER
BEGIN
    DECLARE v_limit BIGINT UNSIGNED DEFAULT GREATEST(
        CAST(COALESCE(p_last, 0) AS UNSIGNED) + 4294967296,
        CAST(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6)) AS UNSIGNED)
            + 86400000000);
    IF p_token > v_limit THEN
        CALL `{prefix}_refuse`('FL003', CONCAT('fencing token is implausibly far ahead token=', p_token,
            ' limit=', v_limit, ' watermark=', COALESCE(p_last, 'none')));
    END IF;
END
//
