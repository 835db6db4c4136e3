DELETE FROM main.fencelock_values WHERE resource = ?1
