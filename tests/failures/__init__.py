"""Any party may die: kill matrix, fault proxy, leavers, drain, chaos."""
