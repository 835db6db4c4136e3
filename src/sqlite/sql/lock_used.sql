UPDATE main.fencelock_locks SET used_unix_us = ?2 WHERE name = ?1
