package limiter

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/legion-gorm/legion/internal/agentid"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/internal/run"
)

// MaxRules is the most rules that one call may have.
const MaxRules = 64

// Policy is what a group may use. A nil limit is unlimited, 0 always denies, and a
// negative one is invalid. [Max] makes one from a number.
//
// The zero Policy stands for the plugin's default policy (legion.WithDefaultPolicy);
// where there is none it is invalid. A Policy with a Window and no limit is allowed:
// it records the agent and limits nothing.
type Policy struct {
	// Window is how far back MaxAgents, MaxTokens and MaxEvals look: a rolling window
	// that ends now, by the database's clock. It must be at least a microsecond,
	// which is PostgreSQL's resolution.
	Window time.Duration

	// MaxAgents is how many agents may have started within the window, the caller
	// included. An agent that is admitted again keeps its first start.
	MaxAgents *int64

	// MaxRunningAgents is how many agents may run at once, the caller included,
	// whenever they started. An admission under such a rule marks the agent as
	// running for the plugin's lease (30 s by default): [Release] or store.Save with
	// StatusIdle gives the slot back, another Enforce of the same agent renews it.
	MaxRunningAgents *int64

	// MaxTokens is how many tokens the group may have recorded within the window for
	// the agent still to start: it denies once the sum has reached the limit. Tokens
	// that other agents' turns hold reserved count as recorded.
	MaxTokens *int64

	// MaxEvals is the same for code evaluations.
	MaxEvals *int64
}

// Max makes a limit for a [Policy]. Max(0) denies always.
func Max(limit int64) *int64 { return &limit }

// Rule is a group and its limits.
type Rule struct {
	// Name stands in errors and logs, so that a person knows which rule denied. It
	// may be empty; the fields of the identity then say it.
	Name string

	// Identity is the group. Rules of one call that share a field must agree on its
	// value, since the agent is recorded under all of them together.
	Identity Identity

	// Policy are the limits of the group. The zero Policy is the plugin's default.
	Policy Policy
}

// preparedRule is a rule after validation.
type preparedRule struct {
	Rule // with the default policy filled in
	document
}

// A request is one agent that asks to be admitted, validated: nothing in it can be
// refused by the database for its form.
type request struct {
	agentID string
	rules   []preparedRule
	merged  document

	// turn is what is written beside the admission when a turn begins, or nil.
	turn *run.Begin

	// limited says, for a turn that keeps the agent's groups, that it has any.
	limited bool
}

// quotas are the policy's quotas with what the request asks of them.
func (r *request) quotas(policy Policy, usage Usage) []Quota {
	quotas := policy.quotas(usage)
	if r.turn == nil {
		return quotas
	}

	for i := range quotas {
		if quotas[i].Limit == LimitTokens {
			quotas[i].Requested = r.turn.Reserve
		}
	}

	return quotas
}

func (r *request) limitsRunning() bool {
	return slices.ContainsFunc(r.rules, func(rule preparedRule) bool { return rule.Policy.MaxRunningAgents != nil })
}

func (r *request) limitsUsage() bool {
	return slices.ContainsFunc(r.rules, func(rule preparedRule) bool { return rule.Policy.limitsUsage() })
}

func (p Policy) limitsUsage() bool { return p.MaxTokens != nil || p.MaxEvals != nil }

// limitsSlots reports whether the policy counts slots, or what they reserve.
func (p Policy) limitsSlots() bool { return p.MaxRunningAgents != nil || p.MaxTokens != nil }

// identities returns those of the rules.
func (r *request) identities() []document {
	identities := make([]document, len(r.rules))
	for i, rule := range r.rules {
		identities[i] = rule.document
	}

	return identities
}

// contained returns every identity whose group the agent joins and that a checker of
// that group would lock: all that the merged identity contains, and Everyone if a rule
// checks it.
func (r *request) contained() []document {
	contained := r.merged.subsets()

	for _, rule := range r.rules {
		if rule.isEveryone() {
			return append(contained, rule.document)
		}
	}

	return contained
}

var errNoRules = fmt.Errorf("%w: there are no rules: pass at least one, or do not call Enforce for an agent without limits", fault.ErrInvalidRule)

var errWithoutUsage = fmt.Errorf("%w: MaxTokens and MaxEvals need recorded usage, and the plugin has legion.WithoutUsageTracking: "+
	"leave that option out, or these limits", fault.ErrInvalidRule)

// prepare validates one agent and its rules, which may be none. defaultPolicy is nil
// where the plugin has none.
func prepare(agentID string, rules []Rule, defaultPolicy *Policy) (request, error) {
	if err := agentid.Validate(agentID); err != nil {
		return request{}, err
	}

	if len(rules) > MaxRules {
		return request{}, fmt.Errorf("%w: there are %d rules: the limit is %d", fault.ErrInvalidRule, len(rules), MaxRules)
	}

	prepared := make([]preparedRule, len(rules))
	values := make(map[string]string, MaxFields)

	for i, rule := range rules {
		document, err := rule.Identity.canonical()
		if err != nil {
			return request{}, invalid(rules, i, err)
		}

		if rule.Policy, err = rule.Policy.resolve(defaultPolicy); err != nil {
			return request{}, invalid(rules, i, err)
		}

		for _, field := range document.fields {
			if value, ok := values[field.name]; ok && value != field.value {
				return request{}, invalid(rules, i, fmt.Errorf("identity field %q has another value than in an earlier rule: "+
					"an agent has one value for a field, so use another field name", field.name))
			}

			values[field.name] = field.value
		}

		prepared[i] = preparedRule{Rule: rule, document: document}
	}

	merged, err := merge(values)
	if err != nil {
		return request{}, fmt.Errorf("%w: %w", fault.ErrInvalidRule, err)
	}

	return request{agentID: agentID, rules: prepared, merged: merged}, nil
}

func merge(values map[string]string) (document, error) {
	if len(values) > MaxFields {
		return document{}, fmt.Errorf("the rules have %d identity fields together: the limit is %d, drop those that limit nothing", len(values), MaxFields)
	}

	fields := make([]field, 0, len(values))
	for name, value := range values {
		fields = append(fields, field{name: name, value: value})
	}

	merged := newDocument(fields)
	if len(merged.text) > MaxIdentityBytes {
		return document{}, fmt.Errorf("the identities have %d bytes together as JSON: the limit is %d, use shorter values, for example a hash", len(merged.text), MaxIdentityBytes)
	}

	return merged, nil
}

// invalid says which rule is wrong, by position and, where it has one, by name.
func invalid(rules []Rule, index int, err error) error {
	if name := rules[index].Name; name != "" {
		return fmt.Errorf("%w: rule %d (%q): %w", fault.ErrInvalidRule, index+1, name, err)
	}

	return fmt.Errorf("%w: rule %d: %w", fault.ErrInvalidRule, index+1, err)
}

var (
	errPolicyZero   = errors.New("the policy is empty and the plugin has no default policy: set a Window and limits, or legion.WithDefaultPolicy")
	errPolicyWindow = errors.New("Window must be at least 1µs: set how far back the limits look")
)

func (p Policy) resolve(defaultPolicy *Policy) (Policy, error) {
	if p == (Policy{}) {
		if defaultPolicy == nil {
			return p, errPolicyZero
		}

		p = *defaultPolicy
	}

	return p, p.Validate()
}

// Validate reports the first reason why the policy cannot be enforced: a Window
// under a microsecond or a negative limit. The zero Policy is invalid here, since
// whether there is a default depends on the plugin.
func (p Policy) Validate() error {
	if p.Window < time.Microsecond {
		return errPolicyWindow
	}

	for _, quota := range p.quotas(Usage{}) {
		if quota.Max < 0 {
			return fmt.Errorf("the limit on %s is negative: use nil for unlimited, or at least 0", quota.Limit)
		}
	}

	return nil
}

// quotas lists the limits that the policy sets, in a fixed order, with what usage
// says of them.
func (p Policy) quotas(usage Usage) []Quota {
	quotas := make([]Quota, 0, 4)

	for _, quota := range []struct {
		limit Limit
		max   *int64
		used  int64
	}{
		{LimitAgents, p.MaxAgents, usage.Agents},
		{LimitRunningAgents, p.MaxRunningAgents, usage.RunningAgents},
		{LimitTokens, p.MaxTokens, saturatingAdd(usage.Tokens, usage.ReservedTokens)},
		{LimitEvals, p.MaxEvals, usage.Evals},
	} {
		if quota.max != nil {
			quotas = append(quotas, Quota{Limit: quota.limit, Max: *quota.max, Used: quota.used})
		}
	}

	return quotas
}

func saturatingAdd(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}

	return a + b
}
