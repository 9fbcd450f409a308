"""The real engine on a cluster that is not there: forked ranks whose stages compute nothing and whose time is virtual.

[Note: virtual time]
Every rank has a clock, in seconds, which only these things move:

  computing     a layer adds its share of the time that the cost table gives its stage
  messages      a message tells when its first byte reaches the receiver, which its sender works out by the link model;
                who waits for the message goes on at the later of its own time and the arrival [Note: ports]
  collectives   all members go on at the latest of their clocks, later by what the link model says
  peers         the ranks of a stage compute together, so each layer begins when the last of them can begin

All else is the engine that trains: plans, schedules, pulls, pushes and messages between stages happen in their real
order, with real waits between the processes. How long the machine takes for that changes no clock, so ranks may share
cores, and equal runs give equal times to the bit.

Example: two ranks pass a message of wire time 4 and latency 1. Rank 0 has computed until 10 when it sends; the message
is there at 15. Rank 1 has computed until 12 and goes on at 15, whenever its process reads the message. Had it computed
until 20, it would go on at 20.
"""
