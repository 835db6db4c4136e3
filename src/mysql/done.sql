-- Last, so that whoever finds this row finds all of the above.
DELIMITER //

INSERT IGNORE INTO `{prefix}_meta` (one, version, realm)
    VALUES (1, {version}, MD5(CONCAT(UUID(), RAND(), CONNECTION_ID(), UTC_TIMESTAMP(6))))
//

CREATE PROCEDURE `{prefix}_check_version`()
SQL SECURITY INVOKER
BEGIN
    DECLARE v_found INT DEFAULT (SELECT version FROM `{prefix}_meta`);
    IF v_found <> {version} THEN
        CALL `{prefix}_refuse`('FL006', CONCAT(
            'the tables are of another version of fencelock found=', v_found, ' expected={version}'));
    END IF;
END
//

CALL `{prefix}_check_version`()
//
SET SESSION sql_mode = @fencelock_sql_mode
//
DELIMITER ;
