"""Redis and Redis Cluster as stores: the same blocks, one value each, expiry as lease."""

from kvstore.redis.admin import ServerReport, examine
from kvstore.redis.settings import PARAMETERS, SCHEMES, RedisSettings, settings_for, settings_of
from kvstore.redis.store import RedisStore

__all__ = [
    "PARAMETERS",
    "SCHEMES",
    "RedisSettings",
    "RedisStore",
    "ServerReport",
    "examine",
    "settings_for",
    "settings_of",
]
