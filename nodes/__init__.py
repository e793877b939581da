"""The work: functions with torch inside. A node is imported by the processes that run it, never by the runtime."""
