-- Guards the table {table}: whoever changes it has to show a fence of the lock that guards the
-- resource {resource}, and a stale one is refused. The fence is what the function fencelock_fence()
-- of the connection returns: fencelock::sqlite::show in Rust, or in Python
--   connection.create_function("fencelock_fence", 0, lambda: os.environ["FENCELOCK_FENCE"])
-- A connection without such a function cannot change the table.
BEGIN IMMEDIATE;
DROP TRIGGER IF EXISTS {insert};
CREATE TRIGGER {insert} BEFORE INSERT ON {table} BEGIN
    INSERT INTO fencelock_guard (resource, fence) VALUES ({resource}, fencelock_fence());
END;
DROP TRIGGER IF EXISTS {update};
CREATE TRIGGER {update} BEFORE UPDATE ON {table} BEGIN
    INSERT INTO fencelock_guard (resource, fence) VALUES ({resource}, fencelock_fence());
END;
DROP TRIGGER IF EXISTS {delete};
CREATE TRIGGER {delete} BEFORE DELETE ON {table} BEGIN
    INSERT INTO fencelock_guard (resource, fence) VALUES ({resource}, fencelock_fence());
END;
COMMIT;
