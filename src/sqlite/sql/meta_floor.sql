UPDATE main.fencelock_meta SET floor = ?1 WHERE floor < ?1
