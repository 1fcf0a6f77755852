"""The version of the messages between our own processes: parties of different ones do not mix.

Fields that are only added leave it alone. It grows when the same bytes come to mean something else.
"""

PROTOCOL = 1
