"""What may happen next, one file for each kind of thing: functions that look at the state and move it. Pure."""
