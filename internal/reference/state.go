package reference

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"time"
)

// Moment is a point in time, since the model's beginning, that may be absent. It is
// comparable.
type Moment struct {
	Known bool
	At    time.Duration
}

// At is the moment at the given time.
func At(at time.Duration) Moment { return Moment{Known: true, At: at} }

// after reports whether the moment is known and later than the given time.
func (m Moment) after(at time.Duration) bool { return m.Known && m.At > at }

// String writes the time, or that there is none.
func (m Moment) String() string {
	if !m.Known {
		return "never"
	}

	return m.At.String()
}

// Entry is one entry of an agent's usage. It is comparable.
type Entry struct {
	ID            string
	At            time.Duration
	Tokens, Evals int64
}

// Agent is a row.
type Agent struct {
	ID string

	// Parent is the agent whose turn began this one's. Empty: none did.
	Parent string

	// Identity is the merged identity of the rules. Nil: it was never limited.
	Identity Identity

	// Started is the first admission.
	Started Moment

	// Running is the status. What holds a slot is a running row with a lease.
	Running bool

	// Run is whose turn it is. Empty: nobody's, so a slot is an unowned one.
	Run string

	// Lease is when the slot's lease is over.
	Lease Moment

	// Reserved are the tokens that the turn holds back.
	Reserved int64

	// Usage is in the order of the appends.
	Usage []Entry

	// Conversation is what a checkpoint has left.
	Conversation string

	// Updated is the last change to anything but a slot, or the last release.
	Updated time.Duration

	// Deleted is when the row was deleted. It counts all the same.
	Deleted Moment
}

func (a Agent) holdsSlot(now time.Duration) bool {
	return a.Running && a.Lease.Known && (a.Run != "" || a.Lease.after(now))
}

// live reports whether a turn is at work that verdicts, releases and the store must
// leave alone.
func (a Agent) live(now time.Duration) bool {
	return a.Running && a.Run != "" && a.Lease.after(now)
}

// expired reports whether the slot is one that a verdict may revoke.
func (a Agent) expired(now time.Duration) bool {
	return a.holdsSlot(now) && !a.Lease.after(now)
}

// Equal reports whether the rows are the same.
func (a Agent) Equal(b Agent) bool {
	return a.ID == b.ID && a.Parent == b.Parent &&
		(a.Identity == nil) == (b.Identity == nil) && slices.Equal(a.Identity, b.Identity) &&
		a.Started == b.Started &&
		a.Running == b.Running && a.Run == b.Run && a.Lease == b.Lease && a.Reserved == b.Reserved &&
		slices.Equal(a.Usage, b.Usage) && a.Conversation == b.Conversation &&
		a.Updated == b.Updated &&
		a.Deleted == b.Deleted
}

// String writes what there is to say about the row.
func (a Agent) String() string {
	status := "idle"
	if a.Running {
		status = "running"
	}

	var text strings.Builder

	_, _ = fmt.Fprintf(&text, "%s %s started %s updated %s %s run %q lease %s reserved %d",
		a.ID, a.Identity, a.Started, a.Updated, status, a.Run, a.Lease, a.Reserved)

	for _, entry := range a.Usage {
		_, _ = fmt.Fprintf(&text, " %q@%s:%d,%d", entry.ID, entry.At, entry.Tokens, entry.Evals)
	}

	if a.Parent != "" {
		_, _ = fmt.Fprintf(&text, " under %s", a.Parent)
	}

	if a.Conversation != "" {
		_, _ = fmt.Fprintf(&text, " in %q", a.Conversation)
	}

	if a.Deleted.Known {
		_, _ = fmt.Fprintf(&text, " deleted %s", a.Deleted)
	}

	return text.String()
}

// Settings are the plugin's.
type Settings struct {
	// Lease is how long a slot lasts.
	Lease time.Duration

	// Default stands in for zero policies. Nil: they are invalid.
	Default *Policy
}

// State is all rows at one moment. It is immutable: assigning it copies it.
type State struct {
	settings Settings
	now      time.Duration

	// agents are sorted by ID. The slice and what it points to are shared between
	// states, so every change is made in a copy.
	agents []Agent

	race Race
}

// Race is what others do to a verdict while it is reached. A verdict that has none
// revokes every slot that it may, if that decides.
type Race struct {
	// Locked are agents whose rows somebody has locked: a revocation passes over them.
	Locked []string

	// Early says that a violated limit counted an expired slot when the revocation
	// began, and that what made that so has ended before the verdict.
	Early bool
}

// Racing is the state in which the next operation meets this race.
func (s State) Racing(race Race) State {
	s.race = race

	return s
}

// New is the state with no rows, at the time 0.
func New(settings Settings) State { return State{settings: settings} }

// Now is the time.
func (s State) Now() time.Duration { return s.now }

// Agents are the rows, sorted by ID. They must not be changed.
func (s State) Agents() []Agent { return s.agents }

// Agent returns a row, and whether there is one.
func (s State) Agent(id string) (Agent, bool) {
	at, found := s.search(id)
	if !found {
		return Agent{ID: id}, false
	}

	return s.agents[at], true
}

// Equal reports whether time and rows are the same.
func (s State) Equal(other State) bool {
	return s.now == other.now && slices.EqualFunc(s.agents, other.agents, Agent.Equal)
}

// Hash is the same for equal states.
func (s State) Hash() uint64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(s.String()))

	return hash.Sum64()
}

// String writes one row a line.
func (s State) String() string {
	lines := make([]string, 0, 1+len(s.agents))
	lines = append(lines, "at "+s.now.String())

	for _, agent := range s.agents {
		lines = append(lines, agent.String())
	}

	return strings.Join(lines, "\n")
}

func (s State) search(id string) (int, bool) {
	return slices.BinarySearchFunc(s.agents, id, func(agent Agent, id string) int { return strings.Compare(agent.ID, id) })
}

// with returns the state with the row in place of the one of its ID, or added.
func (s State) with(agent Agent) State {
	agents := slices.Clone(s.agents)

	if at, found := s.search(agent.ID); found {
		agents[at] = agent
	} else {
		agents = slices.Insert(agents, at, agent)
	}

	s.agents = agents

	return s
}
