"""What a launching process does about its agents, whatever happens to them; cut-off hosts."""

from __future__ import annotations

from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.launcher import AgentPlan, AgentState, PlacedAgent
from commutator.supervisor.agent_process import CutOff
from commutator.supervisor.placed_fleet import Action, Failed, Place, Remove, reconcile

OLD, NEW = "0a", "1b"
OVER = (AgentState.FAILED, AgentState.ENDING)
ENGINES = {"p": 3, "d": 2}


def plan(engine: str, number: int, generation: str = NEW) -> AgentPlan:
    return AgentPlan(
        name=f"{engine}-{number}", engine=engine, generation=generation, module="m", grace_s=1.0
    )


WANTED = {
    one.name: one
    for engine, count in ENGINES.items()
    for one in (plan(engine, n) for n in range(count))
}
NAMES = [*WANTED, "p-3", "gone-0"]


@define
class World:
    """Agents by name, as a launcher and a registry see them; actions take a while."""

    agents: dict[str, PlacedAgent] = field(factory=dict)
    ready: set[str] = field(factory=set)
    busy: dict[str, Action] = field(factory=dict)

    def decide(self) -> list[Action]:
        return list(reconcile(WANTED, list(self.agents.values()), self.ready, self.busy))

    def begin(self, actions: list[Action]) -> None:
        for action in actions:
            self.busy[action.plan.name if isinstance(action, Place) else action.name] = action

    def finish(self, name: str) -> None:
        match self.busy.pop(name, None):
            case Place(what):
                self.agents[name] = PlacedAgent(
                    name=name, generation=what.generation, state=AgentState.RUNNING
                )
            case Remove() | Failed():
                self.agents.pop(name, None)
                self.ready.discard(name)

    def happens(self, event: str, name: str) -> None:
        agent = self.agents.get(name)
        if event == "finish":
            self.finish(name)
        elif agent is None:
            return
        elif event == "ready" and agent.state not in OVER:
            self.ready.add(name)
            self.agents[name] = evolve(agent, state=AgentState.RUNNING)
        elif event == "ends":
            self.agents[name] = evolve(agent, state=AgentState.ENDING)
        elif event == "lost":
            self.ready.discard(name)
        elif event == "vanishes":
            self.ready.discard(name)
            del self.agents[name]
        elif event == "fails" and name not in self.ready:
            self.agents[name] = evolve(agent, state=AgentState.FAILED, cause="no model")
        elif event == "waits" and name not in self.ready:
            self.agents[name] = evolve(agent, state=AgentState.WAITING)


def check(world: World, actions: list[Action]) -> None:
    names = [one.plan.name if isinstance(one, Place) else one.name for one in actions]
    assert len(names) == len(set(names)), "one action for an agent at a time"
    assert not set(names) & set(world.busy)
    replaced = []
    for action in actions:
        match action:
            case Place(what):
                assert what.name not in world.agents, "nothing is doubled"
            case Failed(name):
                assert world.agents[name].state is AgentState.FAILED
            case Remove(name) if name in WANTED:
                agent = world.agents[name]
                ending = agent.state is AgentState.ENDING
                assert ending or agent.generation != NEW, "what is wanted stays"
                if name in world.ready and not ending:
                    replaced.append(WANTED[name].engine)
                    others = {one for one in WANTED if WANTED[one].engine == replaced[-1]} - {name}
                    assert others <= world.ready - set(world.busy)
    assert len(replaced) == len(set(replaced)), "an engine's workers are replaced one by one"


states = st.builds(
    lambda generation, state, ready: (generation, state, ready),
    st.sampled_from([OLD, NEW, ""]),
    st.sampled_from(list(AgentState)),
    st.booleans(),
)
events = st.lists(
    st.tuples(
        st.sampled_from(
            ["finish", "finish", "ready", "lost", "vanishes", "fails", "waits", "ends", "look"]
        ),
        st.sampled_from(NAMES),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(NAMES), states), events)
def test_whatever_happens_the_wanted_agents_run_in_the_end(
    begin: dict[str, tuple[str, AgentState, bool]], happening: list[tuple[str, str]]
) -> None:
    world = World()
    for name, (generation, state, ready) in begin.items():
        world.agents[name] = PlacedAgent(name=name, generation=generation, state=state)
        if ready and state is AgentState.RUNNING:
            world.ready.add(name)
    for event, name in happening:
        if event == "look":
            actions = world.decide()
            check(world, actions)
            world.begin(actions)
        else:
            world.happens(event, name)
    for _ in range(3 * len(NAMES)):
        for name in list(world.busy):
            world.finish(name)
        for name, agent in world.agents.items():
            if agent.state not in OVER:
                world.ready.add(name)
        actions = world.decide()
        check(world, actions)
        world.begin(actions)
        if not actions:
            break
    assert {name: agent.generation for name, agent in world.agents.items()} == dict.fromkeys(
        WANTED, NEW
    )
    assert world.decide() == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["registry", "control"]),
            st.booleans(),
            st.floats(min_value=0.01, max_value=10),
        ),
        max_size=40,
    )
)
def test_a_host_is_cut_off_only_after_both_were_silent_for_the_limit(
    answers: list[tuple[str, bool, float]],
) -> None:
    limit_s, now_s = 8.0, 100.0
    cut_off = CutOff(limit_s, now_s)
    answered_s, lost = now_s, {"registry": False, "control": False}
    for side, answered, after_s in answers:
        now_s += after_s
        cut_off.saw(side, answered, now_s)
        lost[side] = not answered
        if answered:
            answered_s = now_s
        assert cut_off.suspects is lost["registry"]
        expected = all(lost.values()) and now_s - answered_s >= limit_s
        assert cut_off.is_cut_off(now_s) is expected
