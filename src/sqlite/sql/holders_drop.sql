DELETE FROM main.fencelock_holders WHERE name = ?1
