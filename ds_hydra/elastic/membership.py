"""Which processes train together: events of one member in, what it has to do out, equal views on all members. Pure.

[Note: views follow one another]
Every member has a machine of its own. Its state is one of four:

  RUNNING      training runs in the installed view
  ABORTING     the view is over, and training is being freed from its communication
  VOTED        training stands still, and waits for the next view
  REBUILDING   a view is installed, and training makes its groups and cuts its masters anew

When a member is lost, or a thread of training parks by itself, the coordinator, the lowest id that is not lost, opens a
round: `Stop` to all; each answers with `Vote`, which holds its report, once its training stands still; all that are not
lost having voted, the next roster is decided; then every one of its members gets `Install`, and goes on. What may
happen meanwhile (the coordinator dies, another member does, messages are lost, two members take themselves for the
coordinator) ends in a round of a higher ballot.
"""

from __future__ import annotations

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.messages import Action, Ballot, Event, Message, Roster
from ds_hydra.elastic.rounds import Rounds, State
from ds_hydra.elastic.view import NOTHING_HELD, Member, Report

TURN_S = 0.25  # seconds between two ticks
_AT_ONCE = 4  # turns between an error that a member's leaving has caused and the news of it, at most


class Membership(Rounds):
    """The machine of one member: `handle` takes an event and returns what is to be done, in order."""

    # What others ask.

    @property
    def watched(self) -> tuple[Member, ...]:
        """Members to which this one is to be connected, and of whose loss it must hear."""
        me, coordinator, gone = self.me.id, self.coordinator, self.lost | self.left
        if me < 0 or coordinator != me:
            return tuple(one for one in self.roster.members if one.id == coordinator and one.id != me)
        return tuple(one for one in self.roster.members if one.id != me and one.id not in gone)

    @property
    def wanted(self) -> bool:
        """Whether training is to park at the end of its step, for processes that wait to join."""
        running = self.coordinator == self.me.id and self.state is State.RUNNING
        return running and bool(self._taken(len(self.roster.members)))

    @property
    def faulty(self) -> bool:
        """Whether the installed view is over by a fault."""
        return self.state is State.ABORTING

    def handle(self, event: Event) -> list[Action]:
        """What is to be done, in order."""
        self._out = []
        match event:
            case m.Tick():
                self._tick()
            case m.Heard(sender, message):
                self._hear(sender, message)
            case m.Lost(member, dead):
                self._lose(member, dead)
            case m.Silent(member):
                self._kill(member)
            case m.Parked(report):
                self._park(report)
            case m.Failed():
                self._fail()
            case m.Rebuilt():
                if self.state is State.REBUILDING:
                    self.state, self._rebuilds = State.RUNNING, 0
            case m.Unfit(members):
                self.unfit.add(members)
            case m.Token(epoch, roster):
                self._token(epoch, roster)
            case m.Opened(epoch, store):
                self._opened(epoch, store)
            case m.Knock(joiner):
                if joiner.address not in {one.address for one in self.roster.members}:
                    self.knocks[joiner.address] = joiner
            case m.KnockGone(joiner):
                self.knocks.pop(joiner.address, None)
        return self._out

    # Events of this process.

    def _tick(self) -> None:
        self._turn += 1
        for member in [one for one, turns in self._doomed.items() if turns <= 0]:
            self._lose(member, dead=False)
        self._doomed = {one: turns - 1 for one, turns in self._doomed.items()}
        if self._settled or self.me.id < 0:
            self._settled_for, self._waited, self._unsettled = self._settled_for + 1, 0, 0
            return
        self._waited += 1
        self._unsettled += not self._awaits_step
        if self.state is State.ABORTING and self._unsettled >= self.patience.stuck:
            self._exit("training could not be freed from its communication with lost members")
        elif self._unsettled >= self.patience.give_up:
            self._exit("the members have found no new view in time")
        elif self._awaits_step and self._waited >= self.patience.planned:
            self._call(planned=False)
        elif not self._awaits_step and self._waited % self.patience.again == 0:
            self._remind()

    @property
    def _awaits_step(self) -> bool:
        """Whether a round waits for the end of a step, which may take long."""
        stop = self._owed
        return self.round.planned and self.round.value is None if self.round else stop is not None and stop.planned

    def _park(self, report: Report) -> None:
        running = self.state is not State.ABORTING
        self.report, self.state = report, State.VOTED
        if self._owed is not None:
            self._vote()
        elif self.round is not None:
            self._vote_for_own()
        else:
            self._call(planned=running)

    def _fail(self) -> None:
        """An error after others have left in good order is due to them. That one has left only those know that are
        connected to it: the coordinator, or all where it was that."""
        if self.left & self.roster.ids or self.coordinator == self.me.id:
            self._failing(self.me.id)
        elif self._settled:
            self._send(self.coordinator, m.Failing(self.roster.epoch))

    def _failing(self, member: int) -> None:
        """Training has met an error on a member. What says that another one has left may come a moment later."""
        if self._settled:
            self._failed[member] = self._turn
            if self.left & self.roster.ids - {member}:
                self._call(planned=False)

    # Members that are lost.

    def _lose(self, member: int, dead: bool) -> None:
        self._doomed.pop(member, None)
        if member not in self.roster.ids or member == self.me.id:
            return
        if member in self.left and self._settled:
            return
        if dead:
            self.dead.add(member)
        if member in self.lost:
            return
        self.lost.add(member)
        if self._owed is not None and self._owed.ballot.candidate == member:
            self._owed = None
        current = self.round
        if current is None or (current.value is not None and not self.folder and not current.decided):
            self._call(planned=False)
        elif current.value is None:
            self._open(planned=False) if current.planned else self._count()

    def _kill(self, member: int) -> None:
        """A frozen member is killed first, by one of its host: then it is known to be dead."""
        if member in self._doomed or member in self.lost or member not in self.roster.ids:
            return
        frozen = self.roster.member(member)
        near = [one for one in self.roster.members if one.host == frozen.host and one.id not in self.lost | {member}]
        if not near:
            self._lose(member, dead=False)
            return
        self._doomed[member] = self.patience.killed
        if self.me in near:
            self._out.append(m.KillProcess(frozen))
        else:
            self._send(near[0].id, m.Kill(self.roster, frozen))

    # Messages of other members.

    def _hear(self, sender: int, message: Message) -> None:
        if self.me.id < 0 and not isinstance(message, (m.Stop, m.Install, m.Over)):
            return  # only these tell a process that joins which member it is
        epoch = _epoch_of(message)
        if sender >= 0 and self.roster.members and sender not in self.roster.ids and epoch < self.roster.epoch:
            self._over(sender)
            return
        match message:
            case m.Beat(epoch, installed):
                self._beat(sender, epoch, installed)
            case m.Fault(epoch, planned):
                self._asked(sender, epoch, planned)
            case m.Stop():
                self._stop(sender, message)
            case m.Vote():
                self._voted(sender, message)
            case m.Nack(ballot, roster):
                self._refused(ballot, roster)
            case m.Propose():
                self._proposed(sender, message)
            case m.Accept(ballot):
                if self.round is not None and self.round.ballot == ballot and not self.round.decided:
                    self.round.accepts.add(sender)
                    self._decide_if_accepted()
            case m.Install():
                self._told(message)
            case m.Over(roster):
                if self._learn(roster):  # its install may be on its way; otherwise this is told again, as a fault
                    self._owed = None
            case m.Kill(_, frozen):
                self._out.append(m.KillProcess(frozen))
            case m.Bye():
                self._bye(sender)
            case m.Failing(epoch) if epoch == self.roster.epoch:
                self._failing(sender)

    def _beat(self, sender: int, epoch: int, installed: int) -> None:
        if epoch < self.roster.epoch:
            self._over(sender)
        elif epoch > self.roster.epoch:
            self._send(sender, self.beat())  # and it will say what has happened
        elif installed < self.installed and self._settled and self._settled_for >= self.patience.again:
            self._call(planned=False)  # an install has not come

    def _asked(self, sender: int, epoch: int, planned: bool) -> None:
        """A member asks for a round."""
        if epoch != self.roster.epoch:
            self._beat(sender, epoch, self.installed)
            return
        under_way = self.round or self._owed
        if under_way is None or (under_way.planned and not planned and not self._about_to_install):
            self._call(planned=planned)

    def _stop(self, sender: int, stop: m.Stop) -> None:
        if stop.roster.epoch < self.roster.epoch:
            self._over(sender)
            return
        if stop.roster.epoch > self.roster.epoch and not self._learn(stop.roster):
            return
        if stop.ballot < self._promised:
            self._send(sender, m.Nack(self._promised, self.roster))
            return
        self._promised, self._owed = stop.ballot, stop
        self.round, self._waited = None, 0
        self.lost.discard(sender)
        if not stop.planned:
            self._fault()
        self._vote()

    def _voted(self, sender: int, vote: m.Vote) -> None:
        if vote.roster is not None and vote.epoch > self.roster.epoch:
            if self._learn(vote.roster):
                self._call(planned=False)
            return
        current = self.round
        if current is not None and vote.ballot == current.ballot and current.value is None:
            current.votes[sender] = vote
            self.lost.discard(sender)
            self._count()

    def _refused(self, ballot: Ballot, roster: Roster) -> None:
        """Another round is newer than this member's: let it end first."""
        self._learn(roster)
        if self.round is not None and ballot > self.round.ballot:
            self._promised = max(self._promised, Ballot(ballot.number, -1))
            self.round, self._waited = None, 0

    def _proposed(self, sender: int, proposal: m.Propose) -> None:
        if proposal.epoch < self.roster.epoch:
            self._over(sender)
        elif proposal.epoch == self.roster.epoch and proposal.ballot >= self._promised:
            self._promised, self._accepted = proposal.ballot, (proposal.ballot, proposal.roster)
            self._send(sender, m.Accept(proposal.ballot))

    def _told(self, install: m.Install) -> None:
        if install.roster.epoch > self.roster.epoch and not self._learn(install.roster):
            return
        # A later promise binds: its candidate may have this member's report already, which must stay true.
        newest = install.roster.epoch == self.roster.epoch > self.installed and install.ballot >= self._promised
        if newest and self.report is not None:
            self._promised = install.ballot
            self._install(install.view)

    def _bye(self, sender: int) -> None:
        if self._settled:
            self.left.add(sender)
            # Where all have an error of their own alike, they leave long after it.
            if any(self._turn - turn <= _AT_ONCE for member, turn in self._failed.items() if member != sender):
                self._call(planned=False)
        else:
            self._lose(sender, dead=True)


def _epoch_of(message: Message) -> int:
    match message:
        case m.Beat(epoch=epoch) | m.Fault(epoch=epoch) | m.Bye(epoch=epoch) | m.Propose(epoch=epoch):
            return epoch
        case m.Failing(epoch=epoch) | m.Vote(epoch=epoch):
            return epoch
        case m.Accept():
            return NOTHING_HELD
        case _:
            return message.roster.epoch
