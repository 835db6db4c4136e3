UPDATE main.fencelock_meta SET grants = grants + 1
