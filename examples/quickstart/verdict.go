package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/legion-gorm/legion/limiter"
)

// verdict says in words how an Enforce has ended. Only a denial is an answer: any other
// error means that the question was not answered, and comes back.
func verdict(err error) (string, error) {
	var exceeded *limiter.ExceededError

	switch {
	case err == nil:
		return "admitted", nil
	case errors.As(err, &exceeded):
		return fmt.Sprintf("denied by %q: %s", exceeded.Rule.Name, violations(exceeded)), nil
	default:
		return "", err
	}
}

// violations lists every limit that the rule violates. For starts and running agents the
// figure includes the agent that was denied.
func violations(exceeded *limiter.ExceededError) string {
	texts := make([]string, len(exceeded.Violations))
	for i, quota := range exceeded.Violations {
		texts[i] = fmt.Sprintf("%d %s, limit %d", quota.Used, quota.Limit, quota.Max)
	}

	return strings.Join(texts, " and ")
}
