"""A module whose import does not end, for the tests of the fork server."""

import threading

threading.Event().wait()
