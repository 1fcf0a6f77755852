"""Redis and Redis Cluster as stores: the same blocks, one value each, expiry as lease."""

from kvstore.redis.rarely import Reading, examined
from kvstore.redis.settings import PARAMETERS, SCHEMES, Settings, settings_for, settings_of
from kvstore.redis.store import RedisStore

__all__ = [
    "PARAMETERS",
    "SCHEMES",
    "Reading",
    "RedisStore",
    "Settings",
    "examined",
    "settings_for",
    "settings_of",
]
