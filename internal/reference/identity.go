package reference

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"
)

// Identity is a group's fields, sorted by name. Nil is no identity; the empty one is
// everyone's.
type Identity []Field

// Field is one field of an identity. It is comparable.
type Field struct {
	Name string

	// Value is in canonical form: two values are the same for jsonb exactly if these
	// texts are. Numbers are fractions in lowest terms, strings are quoted.
	Value string
}

var errValue = errors.New("reference: an identity's value is no string, number or boolean")

// NewIdentity makes an identity of strings, booleans, integers, float64s and
// json.Numbers. Anything else is an error.
func NewIdentity(values map[string]any) (Identity, error) {
	identity := make(Identity, 0, len(values))

	for _, name := range slices.Sorted(maps.Keys(values)) {
		value, err := canonical(values[name])
		if err != nil {
			return nil, err
		}

		identity = append(identity, Field{name, value})
	}

	return identity, nil
}

// ParseIdentity reads an identity from a JSON object.
func ParseIdentity(text string) (Identity, error) {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber() // a float64 would take neighbours for one

	var values map[string]any
	if err := decoder.Decode(&values); err != nil {
		return nil, fmt.Errorf("reference: read an identity: %w", err)
	}

	return NewIdentity(values)
}

func canonical(value any) (string, error) {
	switch value := value.(type) {
	case string:
		return strconv.Quote(value), nil
	case bool:
		return strconv.FormatBool(value), nil
	case int, int64, uint64, float64, json.Number:
		number, ok := new(big.Rat).SetString(fmt.Sprint(value))
		if !ok {
			return "", errValue
		}

		return number.RatString(), nil
	default:
		return "", errValue
	}
}

// Contains reports whether every field of part is in i, as jsonb's @> does for flat
// objects. Nil contains nothing, not even everyone's identity.
func (i Identity) Contains(part Identity) bool {
	if i == nil {
		return false
	}

	for _, field := range part {
		if !slices.Contains(i, field) {
			return false
		}
	}

	return true
}

// merge returns the fields of both, or false where they disagree on one.
func (i Identity) merge(other Identity) (Identity, bool) {
	merged := slices.Clone(i)

	for _, field := range other {
		at, found := slices.BinarySearchFunc(merged, field, func(a, b Field) int { return strings.Compare(a.Name, b.Name) })

		switch {
		case !found:
			merged = slices.Insert(merged, at, field)
		case merged[at] != field:
			return nil, false
		}
	}

	return merged, true
}

// String writes the identity as an object.
func (i Identity) String() string {
	if i == nil {
		return "none"
	}

	fields := make([]string, len(i))
	for n, field := range i {
		fields[n] = field.Name + ":" + field.Value
	}

	return "{" + strings.Join(fields, ",") + "}"
}
