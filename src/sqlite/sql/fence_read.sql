SELECT token, holder, seq, domain FROM main.fencelock_fences WHERE resource = ?1
