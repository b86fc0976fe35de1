package limiter

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// MaxFields is the most fields that the identities of one call may have together.
	MaxFields = 8

	// MaxFieldNameBytes is the longest name of an identity's field.
	MaxFieldNameBytes = 64

	// MaxIdentityBytes is the largest merged identity of one call, as JSON text. The
	// identity is a btree key, which PostgreSQL bounds at 2,704 bytes.
	MaxIdentityBytes = 2000
)

// Identity names the group that a rule limits: by IP, tenant, email, or any mix.
//
//	limiter.Identity{"tenant": "acme", "email": "someone@example.com"}
//
// A rule counts the agents whose own identity contains the rule's. So an agent
// that was admitted under {"ip","tenant"} also counts for a rule on {"ip"}.
//
// Values are strings, booleans, numbers of any Go type, [json.Number], and types
// with a MarshalText method (a uuid.UUID, a netip.Addr), which stand for their
// text. Numbers keep their full precision; 1 and 1.0 are one group, "1" is another.
// Null, objects and arrays are errors: flatten them into fields.
//
// A nil Identity is an error, since it is usually one that was forgotten. The empty
// one means [Everyone].
type Identity map[string]any

// Everyone is the empty identity. It matches every limited agent, so that its rule
// is a cap on the whole application.
func Everyone() Identity { return Identity{} }

// A document is an identity in canonical form. Two identities are one group for
// jsonb exactly if their documents have the same text.
type document struct {
	fields []field // sorted by name
	text   string  // the JSON object
}

type field struct {
	name  string
	value string // JSON text
}

func newDocument(fields []field) document {
	slices.SortFunc(fields, func(a, b field) int { return strings.Compare(a.name, b.name) })

	var text strings.Builder

	_ = text.WriteByte('{')

	for i, field := range fields {
		if i > 0 {
			_ = text.WriteByte(',')
		}

		_, _ = text.WriteString(quote(field.name))
		_ = text.WriteByte(':')
		_, _ = text.WriteString(field.value)
	}

	_ = text.WriteByte('}')

	return document{fields: fields, text: text.String()}
}

func (d document) isEveryone() bool { return len(d.fields) == 0 }

// subsets returns every non-empty document that is contained in d.
func (d document) subsets() []document {
	all := make([]document, 0, 1<<len(d.fields)-1)

	for mask := 1; mask < 1<<len(d.fields); mask++ {
		fields := make([]field, 0, len(d.fields))

		for i, field := range d.fields {
			if mask&(1<<i) != 0 {
				fields = append(fields, field)
			}
		}

		all = append(all, newDocument(fields))
	}

	return all
}

// distinct drops what stands there twice, and keeps the order.
func distinct(documents []document) []document {
	if len(documents) < 2 {
		return documents
	}

	seen := make(map[string]bool, len(documents))

	return slices.DeleteFunc(documents, func(document document) bool {
		known := seen[document.text]
		seen[document.text] = true

		return known
	})
}

var (
	errIdentityNil    = errors.New("the identity is nil: name the group that the rule limits, or say limiter.Everyone()")
	errIdentityFields = fmt.Errorf("the identity has more than %d fields: drop those that limit nothing", MaxFields)
)

// canonical validates the identity and brings it into canonical form.
func (i Identity) canonical() (document, error) {
	if i == nil {
		return document{}, errIdentityNil
	}

	if len(i) > MaxFields {
		return document{}, errIdentityFields
	}

	fields := make([]field, 0, len(i))

	for _, name := range slices.Sorted(maps.Keys(i)) {
		if err := validateFieldName(name); err != nil {
			return document{}, err
		}

		value, err := canonicalValue(i[name])
		if err != nil {
			return document{}, fmt.Errorf("identity field %q %w", name, err)
		}

		fields = append(fields, field{name: name, value: value})
	}

	return newDocument(fields), nil
}

func validateFieldName(name string) error {
	switch {
	case name == "":
		return errors.New("an identity field has an empty name: give it 1 to 64 bytes")
	case len(name) > MaxFieldNameBytes:
		return fmt.Errorf("an identity field's name has %d bytes: the limit is %d", len(name), MaxFieldNameBytes)
	case !isText(name):
		return errors.New("an identity field's name is not valid UTF-8 without NUL")
	}

	return nil
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

// Reasons why a value cannot be part of an identity. They follow the field's name.
var (
	errValueNull     = errors.New("is null: leave the field out, or give it a string, number or boolean")
	errValueText     = errors.New("is not valid UTF-8 without NUL: encode it, for example as base64")
	errValueFinite   = errors.New("is not a finite number: give it a value that JSON can hold")
	errValueNumber   = errors.New("is a json.Number that is not a number")
	errValueTooLarge = fmt.Errorf("is a number of more than %d digits: give it as a string", MaxIdentityBytes)
)

// canonicalValue returns the JSON text that stands for the value.
func canonicalValue(value any) (string, error) {
	switch value := value.(type) {
	case nil:
		return "", errValueNull
	case string:
		return canonicalText(value)
	case json.Number:
		return canonicalNumber(value.String())
	}

	reflected := reflect.ValueOf(value)
	if reflected.Kind() == reflect.Pointer && reflected.IsNil() {
		return "", errValueNull
	}

	if marshaler, ok := value.(encoding.TextMarshaler); ok {
		text, err := marshaler.MarshalText()
		if err != nil {
			// The cause may quote the value, so it is left out.
			return "", fmt.Errorf("is a %T that cannot be written as text", value)
		}

		return canonicalText(string(text))
	}

	switch reflected.Kind() {
	case reflect.String:
		return canonicalText(reflected.String())
	case reflect.Bool:
		return strconv.FormatBool(reflected.Bool()), nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return strconv.FormatInt(reflected.Int(), 10), nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		return strconv.FormatUint(reflected.Uint(), 10), nil
	case reflect.Float32:
		return canonicalFloat(reflected.Float(), 32)
	case reflect.Float64:
		return canonicalFloat(reflected.Float(), 64)
	default:
		return "", fmt.Errorf("is a %T: flatten it into fields that are strings, numbers or booleans", value)
	}
}

func canonicalText(text string) (string, error) {
	if !isText(text) {
		return "", errValueText
	}

	return quote(text), nil
}

// quote writes text that is valid UTF-8 as JSON, without the escapes for HTML that
// json.Marshal adds and that would count towards MaxIdentityBytes.
func quote(text string) string {
	var quoted strings.Builder

	encoder := json.NewEncoder(&quoted)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(text) //nolint:errchkjson // a string cannot fail, nor can a strings.Builder

	return strings.TrimSuffix(quoted.String(), "\n")
}

func canonicalFloat(value float64, bits int) (string, error) {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return "", errValueFinite
	}

	return canonicalNumber(strconv.FormatFloat(value, 'g', -1, bits))
}

// canonicalNumber writes a JSON number in plain decimal notation without needless
// zeros, so that numbers that are equal as numeric, hence as jsonb, have one text.
func canonicalNumber(number string) (string, error) {
	// A JSON number ends in a digit; what is valid JSON may also end in white space.
	if !json.Valid([]byte(number)) || !strings.ContainsAny(number[:1], "-0123456789") || !strings.ContainsAny(number[len(number)-1:], "0123456789") {
		return "", errValueNumber
	}

	mantissa, negative := strings.CutPrefix(number, "-")

	exponent := 0
	if at := strings.IndexAny(mantissa, "eE"); at >= 0 {
		parsed, err := strconv.Atoi(mantissa[at+1:])
		if err != nil || parsed < -MaxIdentityBytes || parsed > MaxIdentityBytes {
			return "", errValueTooLarge
		}

		exponent, mantissa = parsed, mantissa[:at]
	}

	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	point := len(digits) - len(fraction) + exponent // digits before the decimal point
	digits = strings.TrimRight(digits, "0")

	var plain string

	switch {
	case digits == "":
		return "0", nil // also -0, which jsonb holds equal
	case point <= 0:
		plain = "0." + strings.Repeat("0", -point) + digits
	case point >= len(digits):
		plain = digits + strings.Repeat("0", point-len(digits))
	default:
		plain = digits[:point] + "." + digits[point:]
	}

	if len(plain) > MaxIdentityBytes {
		return "", errValueTooLarge
	}

	if negative {
		plain = "-" + plain
	}

	return plain, nil
}
