DELETE FROM main.fencelock_holders WHERE name = ?1 AND token = ?2
