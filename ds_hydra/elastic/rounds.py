"""The successor of a roster, as one member finds it with the others: rounds, votes, what is decided. Pure.

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
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.messages import Action, Ballot, Message, Roster
from ds_hydra.elastic.view import NOTHING_HELD, Member, Report, View

_NOBODY = Ballot(-1, -1)


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
    votes: dict[int, m.Vote] = field(default_factory=dict)
    value: Roster | None = None  # proposed, or on its way to the folder
    fresh: bool = True  # made of this round's votes
    accepts: set[int] = field(default_factory=set)
    decided: bool = False


class Rounds:
    """What one member holds of the rounds; `membership.Membership` feeds it with what happens.

    Its methods leave in `_out` what is to be done.
    """

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
        self.roster = roster or Roster(NOTHING_HELD, (), 0)
        self.installed = self.roster.epoch
        self.state = State.RUNNING if roster else State.VOTED
        self.report: Report | None = None if roster else Report()  # while training stands still
        self.lost: set[int] = set()
        self.dead: set[int] = set()  # known to be, of those lost
        self.left: set[int] = set()  # in good order
        self.knocks: dict[tuple[str, int], Member] = {}
        self.unfit: set[int] = set()  # numbers of members that training cannot use
        self.round: _Round | None = None
        self._held = {self.roster.epoch: self.roster.members}  # by epoch, of layouts that training may hold
        self._promised = _NOBODY
        self._accepted: tuple[Ballot, Roster] | None = None  # as successor of the newest roster
        self._owed: m.Stop | None = None  # whose vote is to be sent, or was
        self._failed: dict[int, int] = {}  # members whose training has met an error in this epoch, and in which turn
        self._turn = 0
        self._doomed: dict[int, int] = {}  # turns left to frozen members that are being killed
        self._settled_for = self._waited = self._unsettled = 0  # turns
        self._rebuilds = 0
        self._out: list[Action] = []

    @property
    def coordinator(self) -> int:
        """The lowest id that is not lost, of the newest roster."""
        return min(self.roster.ids - self.lost - self.left | {self.me.id})

    def beat(self) -> m.Beat:
        return m.Beat(self.roster.epoch, self.installed)

    @property
    def _settled(self) -> bool:
        return self.installed == self.roster.epoch and self.report is None and self.state is not State.ABORTING

    def _fault(self) -> None:
        """The installed view is over."""
        if self.state in (State.RUNNING, State.REBUILDING):
            self.state, self._unsettled, self._waited = State.ABORTING, 0, 0
            self._failed.clear()
            self._out.append(m.Abort())

    # Rounds.

    def _call(self, *, planned: bool) -> None:
        """A round is needed."""
        if not planned:
            self._fault()
        if self.coordinator != self.me.id:
            self._send(self.coordinator, m.Fault(self.roster.epoch, planned))
        elif self.round is None or self.round.decided or not planned:
            self._open(planned)

    def _open(self, planned: bool) -> None:
        """Begin a round as its candidate."""
        self.lost |= self.left
        self.dead |= self.left
        number = max(self._promised.number, self.roster.epoch) + 1
        self._promised = Ballot(number, self.me.id)
        self.round, self._owed, self._waited = _Round(self._promised, planned, self.roster.members), None, 0
        if not planned:
            self._fault()
        self._say(self._living(), m.Stop(self._promised, self.roster, planned))
        self._vote_for_own()

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
            self._say(self._living() - set(current.votes), m.Stop(current.ballot, self.roster, current.planned))
        elif not self.folder and not current.decided:
            self._say(set(current.votes) - current.accepts, self._proposal(current))

    def _vote_for_own(self) -> None:
        if self.round is not None and self.report is not None and self.round.value is None:
            self.round.votes[self.me.id] = self._own_vote(self.round.ballot, self.roster)
            self._count()

    def _vote(self) -> None:
        """Send the vote that is owed, if training stands still."""
        if self._owed is not None and self.report is not None:
            self._send(self._owed.ballot.candidate, self._own_vote(self._owed.ballot, self._owed.roster))

    def _own_vote(self, ballot: Ballot, asked: Roster) -> m.Vote:
        """Without what the stop has said: a thousand members' votes with a thousand members each are too much."""
        assert self.report is not None, "training stands still"
        held, newer = self._held.get(self.report.layout_epoch, ()), self.roster.epoch > asked.epoch
        return m.Vote(
            ballot, self.roster.epoch, self.roster if newer else None, self._accepted, self.report,
            None if held == asked.members else held,
        )  # fmt: skip

    def _count(self) -> None:
        """All that are not lost have voted: decide who goes on."""
        current = self.round
        if current is None or current.value is not None or not self.roster.ids - self.lost <= set(current.votes):
            return
        voters, all_of_them = set(current.votes), self.roster.ids
        half = 2 * len(voters) - len(all_of_them)
        if not (half > 0 or (self.folder and (half == 0 or all_of_them - voters <= self.dead))):
            self._exit(
                f"only {len(voters)} of the {len(all_of_them)} last members are left here, and the others may still "
                "live" + ("" if self.folder else ", with no folder that all of them see to decide by")
            )
            return
        accepted = [vote.accepted for vote in current.votes.values() if vote.accepted is not None]
        current.fresh = not accepted
        current.value = max(accepted, key=lambda one: one[0])[1] if accepted else self._next_roster(current)
        if self.folder:
            self._out.append(m.TakeToken(self.roster.epoch, current.value))
            return
        self._accepted = (current.ballot, current.value)
        current.accepts = {self.me.id}
        self._say(voters, self._proposal(current))
        self._decide_if_accepted()

    def _next_roster(self, current: _Round) -> Roster:
        members = [one for one in self.roster.members if one.id in current.votes]
        first = self.roster.next_id
        joiners = self._taken(len(members)) if current.planned else []
        members += [replace(joiner, id=first + index) for index, joiner in enumerate(joiners)]
        # Ranks of a host lie side by side, and the first one is no joiner's.
        of_host = {one.host: one.id for one in sorted(members, key=lambda one: -one.id)}
        members.sort(key=lambda one: (of_host[one.host], one.id))
        return Roster(current.ballot.number, tuple(members), first + len(joiners))

    def _taken(self, members: int) -> list[Member]:
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

    def _token(self, epoch: int, roster: Roster | None) -> None:
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

    def _opened(self, epoch: int, store: tuple[str, int]) -> None:
        """Make the view, and tell it to all its members."""
        current = self.round
        if current is None or not current.decided or epoch != self.roster.epoch:
            return
        if self._promised != current.ballot or self.roster.ids & self.lost:
            self._call(planned=False)
            return
        newest = max(current.votes.values(), key=lambda vote: vote.report.layout_epoch)
        reports = {one.id: current.votes[one.id].report if one.id in current.votes else Report()
                   for one in self.roster.members}  # fmt: skip
        former = current.members if newest.held is None else newest.held
        view = View(epoch, self.roster.members, former, store, reports)
        self._say(self.roster.ids, m.Install(current.ballot, self.roster, view))
        self._install(view)

    def _install(self, view: View) -> None:
        assert self.report is not None, "training stands still between a vote and the install that follows it"
        kept = min(view.epoch, self.report.layout_epoch)
        self._held = {epoch: members for epoch, members in self._held.items() if epoch >= kept}
        self._held[view.epoch] = view.members
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
                self._exit(f"the others have gone on without this process, in epoch {roster.epoch}")
            return False
        # Who was lost may be in it again, if others have reached it: this member then has to find out anew.
        self.me, self.roster, self.lost = me, roster, set(self.dead)
        for member in roster.members:
            self.knocks.pop(member.address, None)
        self.round, self._accepted, self._doomed, self._waited = None, None, {}, 0
        self._fault()
        return True

    # Saying and ending.

    def _living(self) -> frozenset[int]:
        return self.roster.ids - self.lost

    @property
    def _about_to_install(self) -> bool:
        return self.round is not None and self.round.decided

    def _over(self, to: int) -> None:
        if to not in self.roster.ids or not self._about_to_install:
            self._send(to, m.Over(self.roster))

    def _say(self, to: Iterable[int], message: Message) -> None:
        for number in sorted(set(to) - {self.me.id}):
            self._send(number, message)

    def _send(self, to: int, message: Message) -> None:
        if to != self.me.id:
            known = [one for one in self.roster.members if one.id == to]
            self._out.append(m.Send(known[0] if known else _unknown(to), message))

    def _exit(self, why: str) -> None:
        self._out.append(m.Exit(why))


def _unknown(number: int) -> Member:
    """A process that is no member: to be answered over the connection on which it spoke."""
    return Member(number, "", ("", 0))
