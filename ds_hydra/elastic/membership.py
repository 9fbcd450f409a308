"""The state machine by which members agree on who trains together: events of one, and what it has to do. Pure.

[Note: views follow one another]
Every member has a machine of its own. Its state is one of four:

  RUNNING      training runs in the installed view
  ABORTING     the view is over, and training is being freed from its communication
  VOTED        training stands still, and waits for the next view
  REBUILDING   a view is installed, and training makes its groups and cuts its masters anew

When a member is lost, or a thread of training parks by itself, the coordinator, the lowest id that is not lost, opens a
round: `Stop` to all; each answers with `Vote`, which holds its report, once its training stands still; all that are not
lost having voted, those that are, and are not known to be dead, are asked once more, since a network may be back; then
the next roster is decided, and every one of its members gets `Install`, and goes on. What may
happen meanwhile (the coordinator dies, another member does, messages are lost, two members take themselves for the
coordinator) ends in a round of a higher ballot.

[Note: one successor]
The successor of each roster is decided once, whoever asks, so that parts of a job that cannot reach each other never
both go on:

  with a folder that all members see   by a file there, which is made with O_EXCL and holds the roster. More than half
      of the last members may try to make it; exactly half; or less, where all others are known to be dead.
  without one   by more than half of the last members, which accept it (single-decree Paxos; Lamport, ACM TOCS 16(2),
      1998). A vote tells what its member has accepted before; the newest of these is proposed again.

A roster that is found decided and was not installed by the round that finds it is never installed: reports of its
members may be older than what has happened since. It only becomes the one whose successor is sought.
Who is in no newest roster ends with code 75, as do too few to decide.

[Note: leaving]
Members that have had notice park at the end of a step, as all do, and vote, but the next roster is without them. All
name the same ones, so all look to the first of the others as their coordinator. Any fault makes it a round like others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.messages import NOTHING_HELD, Action, Ballot, Member, Message, Report, Roster, View, lacking
from ds_hydra.zero_hetero.norm_table import NormTable

TURN_S = 0.25  # seconds between two ticks
_AT_ONCE = 4  # turns between an error that a member's leaving has caused and the news of it, at most


class State(Enum):
    """Where this member is [Note: views follow one another]."""

    RUNNING = "running"
    ABORTING = "aborting"
    VOTED = "voted"
    REBUILDING = "rebuilding"


@dataclass(frozen=True, slots=True)
class Patience:
    """Turns after which a member acts, if nothing else has happened."""

    stuck: int = 16  # training that is not free by then never will be: this process ends
    again: int = 8  # what was said is said again
    planned: int = 40  # a stop at the step's end, for which some wait, becomes an abort
    killed: int = 8  # a frozen process that was told to be killed counts as lost
    give_up: int = 240  # no view was installed
    rebuilds: int = 8  # views in a row that training could not use


@dataclass
class _Round:
    """A round of which this member is the candidate."""

    ballot: Ballot
    planned: bool
    members: tuple[Member, ...]  # of the roster that is stopped
    epoch: int  # of that
    votes: dict[int, m.Vote] = field(default_factory=dict)
    tables: dict[str, NormTable] = field(default_factory=dict)  # by name, for those that lack them
    again: set[int] = field(default_factory=set)  # lost members that were asked once more since the last one came back
    value: Roster | None = None  # proposed, or on its way to the folder
    fresh: bool = True  # made of this round's votes
    accepts: set[int] = field(default_factory=set)
    decided: bool = False


class Membership:
    """The machine of one member: each event is a method, and `taken` returns what is to be done then, in order."""

    def __init__(
        self,
        me: Member,
        roster: Roster | None,
        *,
        folder: bool,
        patience: Patience | None = None,
        most: int | None = None,
    ):
        """`roster`: of the job's start; None for a process that wants to join, whose id is -1.

        `folder`: whether all members see one folder, alike on all of them [Note: one successor]. `most`: how many may
        be members, alike on all of them; who comes besides waits until one is lost. None: any number.
        """
        self.me, self.folder, self.most = me, folder, most
        self.patience = patience or Patience()
        self.roster = roster or m.NOBODY
        self.rosters = {roster.epoch: roster} if roster else {}  # by epoch, since that of training's layout
        self.installed = self.roster.epoch
        self.state = State.RUNNING if roster else State.VOTED
        self.report: Report | None = None if roster else Report()  # while training stands still
        self.tables: dict[str, NormTable] = {}  # that it names
        self.lost: set[int] = set()
        self.dead: set[int] = set()  # known to be, of those lost
        self.left: set[int] = set()  # in good order
        self.leaving = frozenset[int]()  # by the round at the end of the present step [Note: leaving]
        self.knocks: dict[tuple[str, int], Member] = {}
        self.unfit: set[int] = set()  # numbers of members that training cannot use
        self.round: _Round | None = None
        self._promised = m.NO_BALLOT
        self._accepted: tuple[Ballot, Roster] | None = None  # as successor of the newest roster
        self._owed: m.Stop | None = None  # whose vote is to be sent, or was
        self._failed: dict[int, int] = {}  # members whose training has met an error in this epoch, and in which turn
        self._turn = 0
        self._doomed: dict[int, int] = {}  # turns left to frozen members that are being killed
        self._settled_for = self._waited = self._unsettled = 0  # turns
        self._rebuilds = 0
        self._out: list[Action] = []

    def taken(self) -> list[Action]:
        """What is to be done since the last call, in order."""
        out, self._out = self._out, []
        return out

    # What others ask.

    @property
    def coordinator(self) -> int:
        """The lowest id that is neither lost nor leaves, of the newest roster."""
        return min((self.roster.ids - self.lost - self.left | {self.me.id}) - self.leaving or {self.me.id})

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
        return running and bool(self._joining(len(self.roster.members)))

    def beat(self) -> m.Word:
        return m.Word("beat", self.roster.epoch, self.installed)

    @property
    def _settled(self) -> bool:
        return self.installed == self.roster.epoch and self.report is None and self.state is not State.ABORTING

    @property
    def _awaits_step(self) -> bool:
        """Whether a round waits for the end of a step, which may take long."""
        if self.round:
            return self.round.planned and self.round.value is None
        return self._owed is not None and self._owed.planned

    # Events of this process.

    def tick(self) -> None:
        """A turn of `TURN_S` has passed in which this process ran."""
        self._turn += 1
        for member in [one for one, turns in self._doomed.items() if turns <= 0]:
            self.lose(member, dead=False)
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

    def park(self, report: Report, tables: Iterable[NormTable] = (), leaving: frozenset[int] = frozenset()) -> None:
        """Training stands still here, out of all communication; `tables` are those that the report names, `leaving`
        members that leave, alike on all that park at the end of this step."""
        running = self.state is not State.ABORTING
        self.leaving = leaving if running else frozenset()
        self.report, self.tables, self.state = report, {one.name: one for one in tables}, State.VOTED
        if self._owed is not None:
            self._vote()
        elif self.round is not None:
            self._vote_for_own()
        else:
            self._call(planned=running)

    def rebuilt(self) -> None:
        """Training uses the installed view."""
        if self.state is State.REBUILDING:
            self.state, self._rebuilds = State.RUNNING, 0

    def fail(self) -> None:
        """Training has met an error here, which may come from another member: an error after others have left in good
        order is due to them. That one has left only those know that are connected to it: the coordinator, or all where
        it was that."""
        if self.left & self.roster.ids or self.coordinator == self.me.id:
            self._failing(self.me.id)
        elif self._settled:
            self._send(self.coordinator, m.Word("failing", self.roster.epoch))

    def _failing(self, member: int) -> None:
        """Training has met an error on a member. What says that another one has left may come a moment later."""
        if self._settled:
            self._failed[member] = self._turn
            if self.left & self.roster.ids - {member}:
                self._call(planned=False)

    def knock(self, joiner: Member) -> None:
        """A process, whose id is -1, wants to join, until it is taken out of `knocks`."""
        if joiner.address not in {one.address for one in self.roster.members}:
            self.knocks[joiner.address] = joiner

    # Members that are lost.

    def lose(self, member: int, dead: bool) -> None:
        """A member cannot be reached; `dead`: nobody listens at its address, while its host answers."""
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

    def silent(self, member: int) -> None:
        """A member is connected, and has not been heard for too long: it is killed first, by one of its host. Then it
        is known to be dead."""
        if member in self._doomed or member in self.lost or member not in self.roster.ids:
            return
        frozen = self.roster.by_id[member]
        near = [one for one in self.roster.members if one.host == frozen.host and one.id not in self.lost | {member}]
        if not near:
            self.lose(member, dead=False)
            return
        self._doomed[member] = self.patience.killed
        if self.me in near:
            self._out.append(m.KillProcess(frozen))
        else:
            self._send(near[0].id, m.Word("kill", self.roster.epoch, member))

    # Messages of other members.

    def hear(self, sender: int, message: Message) -> None:
        """A message from the process that is `sender`."""
        if self.me.id < 0 and not isinstance(message, (m.Stop, m.Install, m.Newer)):
            return  # only these tell a process that joins which member it is
        epoch = message.roster.epoch if isinstance(message, (m.Install, m.Newer)) else message.epoch
        asks = isinstance(message, (m.Stop, m.Propose)) or (isinstance(message, m.Word) and message.what in m.ASKING)
        is_former = sender >= 0 and self.roster.members and sender not in self.roster.ids
        if epoch < self.roster.epoch and (asks or is_former):
            self._newer(sender)
            return
        if epoch > self.roster.epoch and asks:
            self._send(sender, m.Word("ask", self.roster.epoch))  # it is asked once more then
            return
        match message:
            case m.Word():
                self._word(sender, message)
            case m.Stop():
                self._stop(sender, message)
            case m.Vote():
                self._voted(sender, message)
            case m.Propose():
                self._proposed(sender, message)
            case m.Install():
                self._told(message)
            case m.Newer(roster, ballot):
                if self._learn(roster):  # its install may be on its way; otherwise this is told again, as a fault
                    self._owed = None
                elif self.round is not None and ballot > self.round.ballot:  # let that one end first
                    self._promised = max(self._promised, Ballot(ballot.number, -1))
                    self.round, self._waited = None, 0

    def _word(self, sender: int, word: m.Word) -> None:
        match word.what:
            case "bye":
                self._bye(sender)
            case "accept":
                if self.round is not None and self.round.ballot.number == word.number and not self.round.decided:
                    self.round.accepts.add(sender)
                    self._decide_if_accepted()
            case "beat":
                # Of what is on its way to it a member need not be told.
                if word.number > self.roster.epoch:
                    self._send(sender, m.Word("ask", self.roster.epoch))
                elif word.number < self.installed and self._settled and self._settled_for >= self.patience.again:
                    if word.epoch < self.roster.epoch:
                        self._newer(sender)
                    else:
                        self._call(planned=False)  # an install has not come
            case "planned":  # who says it has parked, and may know better who is to be the coordinator then
                if self.round is None and self._owed is None:
                    self._open(planned=True)
            case "fault":
                under_way = self.round or self._owed
                if under_way is None or (under_way.planned and not self._about_to_install):
                    self._call(planned=False)
            case "failing":
                self._failing(sender)
            case "kill" if word.number in self.roster.ids:
                self._out.append(m.KillProcess(self.roster.by_id[word.number]))

    def _stop(self, sender: int, stop: m.Stop) -> None:
        if stop.ballot < self._promised:
            self._send(sender, m.Newer(self.roster, self._promised))
        else:
            self._promised, self._owed = stop.ballot, stop
            self.round, self._waited = None, 0
            self.lost.discard(sender)
            if not stop.planned:
                self._fault()
            self._vote()

    def _voted(self, sender: int, vote: m.Vote) -> None:
        current = self.round
        if current is not None and vote.ballot == current.ballot and current.value is None:
            current.votes[sender] = vote
            current.tables |= {one.name: one for one in vote.tables}
            self.lost.discard(sender)
            if sender in current.again:
                current.again.clear()
            self._count()

    def _proposed(self, sender: int, proposal: m.Propose) -> None:
        if proposal.ballot >= self._promised:
            self._promised, self._accepted = proposal.ballot, (proposal.ballot, proposal.roster)
            self._send(sender, m.Word("accept", proposal.epoch, proposal.ballot.number))

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
            self.lose(sender, dead=True)

    # Rounds.

    def _fault(self) -> None:
        """The installed view is over."""
        self.leaving = frozenset()
        if self.state in (State.RUNNING, State.REBUILDING):
            self.state, self._unsettled, self._waited = State.ABORTING, 0, 0
            self._failed.clear()
            self._out.append(m.Abort())

    def _call(self, *, planned: bool) -> None:
        """A round is needed."""
        if not planned:
            self._fault()
        if self.coordinator != self.me.id:
            self._send(self.coordinator, m.Word("planned" if planned else "fault", self.roster.epoch))
        elif self.round is None or self.round.decided or not planned:
            self._open(planned)

    def _open(self, planned: bool) -> None:
        """Begin a round as its candidate."""
        self.lost |= self.left
        self.dead |= self.left
        number = max(self._promised.number, self.roster.epoch) + 1
        self._promised = Ballot(number, self.me.id)
        self.round = _Round(self._promised, planned, self.roster.members, self.roster.epoch)
        self._owed, self._waited = None, 0
        if not planned:
            self._fault()
        self._ask(self._living)
        self._vote_for_own()

    def _ask(self, of: Collection[int], tables: tuple[str, ...] = ()) -> None:
        """Tell members to stop; who does not know the newest roster asks for it."""
        assert self.round is not None, "one is open"
        self._say(of, m.Stop(self.round.ballot, self.roster.epoch, self.round.planned, tables))

    def _remind(self) -> None:
        """Nothing has come for a while: say again what was said."""
        current = self.round
        if current is None:
            if (
                self._owed is None
                or self._owed.ballot.candidate in self.lost
                or self._waited >= 4 * self.patience.again
            ):
                self._call(planned=False)
        elif current.value is None:
            self._ask(self._living - set(current.votes))
            self._count()
        elif not self.folder and not current.decided:
            self._say(set(current.votes) - current.accepts, self._proposal(current))

    def _vote_for_own(self) -> None:
        if self.round is not None and self.report is not None:
            self._voted(self.me.id, self._own_vote(self.round.ballot, self.tables))

    def _vote(self) -> None:
        """Send the vote that is owed, if training stands still."""
        owed = self._owed
        if owed is None or self.report is None:
            return
        if owed.epoch < self.roster.epoch:
            self._newer(owed.ballot.candidate)
        else:
            self._send(owed.ballot.candidate, self._own_vote(owed.ballot, owed.tables))

    def _own_vote(self, ballot: Ballot, tables: Iterable[str] = ()) -> m.Vote:
        assert self.report is not None, "training stands still"
        held = self.rosters.get(self.report.layout_epoch, m.NOBODY).members
        told = tuple(self.tables[name] for name in tables if name in self.tables)
        return m.Vote(
            ballot, self.roster.epoch, self._accepted, self.report, None if held == self.roster.members else held, told
        )

    def _count(self) -> None:
        """All that are not lost have voted: decide who goes on."""
        current = self.round
        if current is None or current.value is not None or not self._living <= current.votes.keys():
            return
        voters, all_of_them = set(current.votes), self.roster.ids
        half = 2 * len(voters) - len(all_of_them)
        if not (half > 0 or (self.folder and (half == 0 or all_of_them - voters <= self.dead))):
            self._exit(
                f"only {len(voters)} of the {len(all_of_them)} last members are left here, and the others may still "
                "live" + ("" if self.folder else ", with no folder that all of them see to decide by")
            )
            return
        # One that was lost and is back shows that the network is, so others may be back too.
        if again := self.roster.ids & self.lost - self.dead - current.again:
            current.again |= again
            self.lost -= again
            self._ask(again)
            return
        accepted = [vote.accepted for vote in current.votes.values() if vote.accepted is not None]
        value = max(accepted, key=lambda one: one[0])[1] if accepted else self._next_roster(current)
        if not accepted and self._fetch(current, value):
            return
        current.fresh, current.value = not accepted, value
        if self.folder:
            self._out.append(m.TakeToken(self.roster.epoch, value))
            return
        self._accepted = (current.ballot, value)
        current.accepts = {self.me.id}
        self._say(voters, self._proposal(current))
        self._decide_if_accepted()

    def _fetch(self, current: _Round, value: Roster) -> bool:
        """Ask for the tables that members lack; whether one is to come."""
        names = set(lacking(self._reports(current, value)).values()) - current.tables.keys()
        for name in sorted(names):
            holders = (one for one, vote in current.votes.items() if name in (vote.report.table, vote.report.last))
            living = next((one for one in holders if one not in self.lost), None)
            if living is None:  # it was there when it voted
                self._open(planned=False)
                return True
            self._ask([living], (name,))
        return bool(names)

    def _reports(self, current: _Round, roster: Roster) -> dict[int, Report]:
        """By id, of a roster's members; one that joins has none."""
        return {one.id: current.votes[one.id].report if one.id in current.votes else Report() for one in roster.members}

    def _next_roster(self, current: _Round) -> Roster:
        members = [one for one in self.roster.members if one.id in current.votes.keys() - self.leaving]
        first = self.roster.next_id
        joiners = self._joining(len(members)) if current.planned else []
        members += [replace(joiner, id=first + index) for index, joiner in enumerate(joiners)]
        # Ranks of a host lie side by side, and the first one is no joiner's.
        of_host = {one.host: one.id for one in sorted(members, key=lambda one: -one.id)}
        members.sort(key=lambda one: (of_host[one.host], one.id))
        return Roster(current.ballot.number, tuple(members), first + len(joiners))

    def _joining(self, members: int) -> list[Member]:
        """Of those that wait to join so many members as many as training can use; the others go on waiting."""
        joiners = list(self.knocks.values())[: None if self.most is None else max(0, self.most - members)]
        while joiners and members + len(joiners) in self.unfit:
            joiners.pop()
        return joiners

    def _proposal(self, current: _Round) -> m.Propose:
        assert current.value is not None, "votes are counted"
        return m.Propose(current.ballot, self.roster.epoch, current.value)

    def _decide_if_accepted(self) -> None:
        current = self.round
        if current is not None and current.value is not None and 2 * len(current.accepts) > len(self.roster.members):
            self._decided(current.value)

    def token(self, epoch: int, roster: Roster | None) -> None:
        """What stands in the folder as the successor of the roster of `epoch`; None: the folder does not answer."""
        if epoch == self.roster.epoch:
            if roster is None:
                self._exit("the folder by which parts of the job decide which goes on does not answer")
            else:
                self._decided(roster)

    def _decided(self, roster: Roster) -> None:
        """This is the successor of the newest roster."""
        current = self.round
        own = current is not None and current.fresh and current.value == roster and self._promised == current.ballot
        if not self._learn(roster):
            return
        if own and current is not None and not roster.ids & self.lost:
            self.round, current.decided = current, True
            self._out.append(m.OpenStore(roster.epoch))
        elif self._owed is None:
            self._call(planned=False)

    def opened(self, epoch: int, store: tuple[str, int]) -> None:
        """The store of an epoch listens: make the view, and tell it to all its members."""
        current = self.round
        if current is None or not current.decided or epoch != self.roster.epoch:
            return
        if self._promised != current.ballot or self.roster.ids & self.lost:
            self._call(planned=False)
            return
        newest = max(current.votes.values(), key=lambda vote: vote.report.layout_epoch)
        reports = self._reports(current, self.roster)
        former, lacks = current.members if newest.held is None else newest.held, lacking(reports)
        alike: dict[tuple[int, str], list[int]] = defaultdict(list)  # who gets the same message
        for one in reports:
            alike[current.epoch if one in current.votes else NOTHING_HELD, lacks.get(one, "")].append(one)
        for (base, name), members in alike.items():
            tables = (current.tables[name],) if name in current.tables else ()
            told = m.Install(current.ballot, base, self.roster, former, store, tuple(reports.values()), tables)
            self._say(members, told)
            if self.me.id in members:
                own = told.view
        self._say(current.votes.keys() - self.roster.ids, m.Newer(self.roster))
        self._install(own)

    def _install(self, view: View) -> None:
        assert self.report is not None, "training stands still between a vote and the install that follows it"
        kept = min(view.epoch, self.report.layout_epoch)
        self.rosters = {epoch: roster for epoch, roster in self.rosters.items() if epoch >= kept}
        self.installed, self.report, self.state = view.epoch, None, State.REBUILDING
        self.round, self._owed, self._settled_for = None, None, 0
        self._rebuilds += 1
        if self._rebuilds > self.patience.rebuilds:
            self._exit(f"{self.patience.rebuilds} views in a row could not be used by training")
        else:
            self._out.append(m.GoOn(view))

    def _learn(self, roster: Roster) -> bool:
        """Take a roster as the newest; False where this process ends, or knows a newer one."""
        if roster.epoch <= self.roster.epoch:
            return False
        me = next((one for one in roster.members if replace(one, id=-1) == replace(self.me, id=-1)), None)
        if me is None:
            if self.me.id >= 0:  # a process that waits to join goes on waiting
                self._exit(f"the others have gone on without this process, in epoch {roster.epoch}", behind=True)
            return False
        # Who was lost may be in it again, if others have reached it: this member then has to find out anew.
        self.me, self.roster, self.lost = me, roster, set(self.dead)
        self.rosters[roster.epoch] = roster
        for member in roster.members:
            self.knocks.pop(member.address, None)
        self.round, self._accepted, self._doomed, self._waited = None, None, {}, 0
        self._fault()
        return True

    # Saying and ending.

    @property
    def _living(self) -> frozenset[int]:
        return self.roster.ids - self.lost

    @property
    def _about_to_install(self) -> bool:
        return self.round is not None and self.round.decided

    def _newer(self, to: int) -> None:
        """Tell a member that is behind the newest roster, and what is asked of it there."""
        if to in self.roster.ids and self._about_to_install:
            return
        self._send(to, m.Newer(self.roster))
        if to in self.roster.ids and self.round is not None and self.round.value is None:
            self._ask([to])

    def _say(self, to: Iterable[int], message: Message) -> None:
        for number in sorted(set(to) - {self.me.id}):
            self._send(number, message)

    def _send(self, to: int, message: Message) -> None:
        if to != self.me.id:
            # Who is no member is to be answered over the connection on which it spoke.
            self._out.append(m.Send(self.roster.by_id.get(to) or Member(to, "", ("", 0)), message))

    def _exit(self, why: str, *, behind: bool = False) -> None:
        self._out.append(m.Exit(why, behind))
