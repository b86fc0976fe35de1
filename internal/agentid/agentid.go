// Package agentid is the one home of what an agent's ID may be.
package agentid

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/legion-gorm/legion/internal/fault"
)

// MaxBytes is the longest agent ID.
const MaxBytes = 512

// Validate reports why the ID cannot be used, as fault.ErrInvalidAgentID.
func Validate(id string) error {
	switch {
	case id == "":
		return fmt.Errorf("%w: it is empty: give every agent an ID of 1 to %d bytes", fault.ErrInvalidAgentID, MaxBytes)
	case len(id) > MaxBytes:
		return fmt.Errorf("%w: it has %d bytes: the limit is %d, use a hash", fault.ErrInvalidAgentID, len(id), MaxBytes)
	case !utf8.ValidString(id):
		return fmt.Errorf("%w: it is not valid UTF-8: encode it, for example as base64", fault.ErrInvalidAgentID)
	case strings.ContainsRune(id, 0):
		return fmt.Errorf("%w: it contains NUL, which text cannot hold", fault.ErrInvalidAgentID)
	default:
		return nil
	}
}
