"""Imported first by the fork server: a Ctrl-C while it imports the rest just ends it, no traceback.

After that the fork server takes none; see ``spawn``.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
