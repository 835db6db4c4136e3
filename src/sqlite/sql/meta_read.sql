SELECT version, realm, floor, grants FROM main.fencelock_meta
