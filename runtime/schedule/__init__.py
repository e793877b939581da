"""Which firing happens when: the scheduler, its simulator and its replay; pure."""
