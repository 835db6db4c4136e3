-- Guards the table {table}: whoever changes its rows has to show a fence of the lock that guards the
-- resource {resource}, and a stale one is refused. Show it in the session:
--   SET @fencelock_fence = '<the fence or the token>';
-- TRUNCATE, and rows that a foreign key changes by itself, do not come by a trigger: do not grant the
-- one (it needs DROP), and guard the other table too.
-- Where the binary log is on, creating triggers needs log_bin_trust_function_creators or SUPER.
DELIMITER //

DROP TRIGGER IF EXISTS {insert}
//
DROP TRIGGER IF EXISTS {update}
//
DROP TRIGGER IF EXISTS {delete}
//
CREATE TRIGGER {insert} BEFORE INSERT ON {table} FOR EACH ROW CALL `{prefix}_guard`({literal})
//
CREATE TRIGGER {update} BEFORE UPDATE ON {table} FOR EACH ROW CALL `{prefix}_guard`({literal})
//
CREATE TRIGGER {delete} BEFORE DELETE ON {table} FOR EACH ROW CALL `{prefix}_guard`({literal})
//
DELIMITER ;
