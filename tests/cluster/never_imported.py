"""A module whose import never ends, for the tests of the fork server."""

import threading

threading.Event().wait()
