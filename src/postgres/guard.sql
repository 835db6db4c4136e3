-- Guards the table {table}: whoever changes it has to show a fence of the lock that guards the
-- resource {resource}, and a stale one is refused. Show it in the session or the transaction:
--   SET LOCAL fencelock.fence = '<the fence or the token>';
-- or from outside, for any program on libpq:
--   PGOPTIONS="-c fencelock.fence=$FENCELOCK_FENCE"
BEGIN;
DROP TRIGGER IF EXISTS fencelock_guard ON {table};
CREATE TRIGGER fencelock_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION "{schema}".guard({resource});
COMMIT;
