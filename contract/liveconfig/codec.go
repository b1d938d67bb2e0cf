package liveconfig

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// DataKey is the key of the live-config Secret that holds the encoded Config.
	DataKey = "config.json.gz"
	// LabelLive is on every Secret that a dispatcher watches: live configs and the marker.
	LabelLive = "posthorn.dev/live-config"
	// MarkerName is the Secret (labelled LabelLive) that the operator creates after it has compiled
	// every namespace, or failed to; see FailedNamespaces. Until it exists a dispatcher's config is
	// incomplete.
	MarkerName = "posthorn-live-complete"
	// LabelNamespace is on a live-config Secret and contains its namespace, for selectors. The
	// Secret's name is decisive: see SecretName.
	LabelNamespace = "posthorn.dev/live-config-namespace"
	// AnnotationRevision carries the revision of the Config in the Secret.
	AnnotationRevision = "posthorn.dev/revision"
	// AnnotationRelease is set on a live-config Secret by an administrator to end reservations of
	// write keys: the hex SHA-256 of keys, separated by commas, or ReleaseAll. The operator empties
	// it.
	AnnotationRelease = "posthorn.dev/release-write-keys"
	// ReleaseAll is the value of AnnotationRelease that ends all reservations.
	ReleaseAll = "all"
	// MaxEncodedBytes is the largest encoded Config with its Head: what fits into a Kubernetes
	// Secret (1 MiB) with room for its metadata.
	MaxEncodedBytes = 1000 << 10

	maxDecodedBytes = 64 << 20

	// MaxTimeout bounds the timeout of a destination. An installation's ceiling is lower unless its
	// administrator raises it.
	MaxTimeout = time.Minute
	// MaxRetryWindow bounds the retry window of a destination in the same way.
	MaxRetryWindow = 30 * 24 * time.Hour
	// MaxInFlight is the largest MaxInFlight of a destination.
	MaxInFlight = 10_000
)

const secretPrefix = "posthorn-live-"

// SecretName is the name of a namespace's live-config Secret. The hash prevents collisions of a
// namespace's name with other Secrets of Posthorn, such as the marker.
func SecretName(namespace string) string {
	sum := sha256.Sum256([]byte(namespace))
	return secretPrefix + hex.EncodeToString(sum[:4]) + "-" + namespace
}

// NamespaceOf returns the namespace of a live-config Secret's name; ok is false for any other name,
// including the name of a copy.
func NamespaceOf(name string) (namespace string, ok bool) {
	rest, ok := strings.CutPrefix(name, secretPrefix)
	_, namespace, _ = strings.Cut(rest, "-")
	return namespace, ok && name == SecretName(namespace)
}

// Encode returns the canonical, compressed form of a config with its secrets
// revealed, and its revision: the hex SHA-256 of the canonical JSON. Equal
// configs give equal bytes.
func Encode(c Config) (data []byte, revision string, err error) {
	return new(Encoder).Encode(c)
}

// compress returns the gzip form of data. Equal data gives equal bytes.
func compress(plain []byte) ([]byte, error) {
	var buf bytes.Buffer
	// The writer's zero header has no time and no name, so the bytes depend on the content only.
	zip, _ := gzipWriters.Get().(*gzip.Writer)
	defer gzipWriters.Put(zip)
	zip.Reset(&buf)
	if _, err := zip.Write(plain); err != nil {
		return nil, fmt.Errorf("compress live config: %w", err)
	}
	if err := zip.Close(); err != nil {
		return nil, fmt.Errorf("compress live config: %w", err)
	}
	return buf.Bytes(), nil
}

// gzipWriters are reused because each has a megabyte of tables.
var gzipWriters = sync.Pool{New: func() any {
	zip, _ := gzip.NewWriterLevel(io.Discard, gzip.BestCompression) // The level is valid.
	return zip
}}

// decompress reads the output of compress, of at most maxDecodedBytes. size is the expected length.
func decompress(data []byte, size int) ([]byte, error) {
	zip, _ := gzipReaders.Get().(*gzip.Reader)
	defer gzipReaders.Put(zip)
	if err := zip.Reset(bytes.NewReader(data)); err != nil {
		return nil, fmt.Errorf("live config is not gzip: %w", err)
	}
	plain := bytes.NewBuffer(make([]byte, 0, size+size/8+bytes.MinRead))
	if _, err := plain.ReadFrom(io.LimitReader(zip, maxDecodedBytes+1)); err != nil {
		return nil, fmt.Errorf("live config is damaged: %w", err)
	}
	if plain.Len() > maxDecodedBytes {
		return nil, fmt.Errorf("live config is larger than %d bytes", maxDecodedBytes)
	}
	return plain.Bytes(), nil
}

// gzipReaders are reused because each has a window of 32 KiB.
var gzipReaders = sync.Pool{New: func() any { return new(gzip.Reader) }}

// Decode reads the output of Encode. It is strict: an unknown field, an unknown version, trailing
// data or an invalid value is an error, so a config is accepted as a whole or not at all. Only a destination can have
// unknown fields: see UnknownField.
func Decode(data []byte) (c Config, revision string, err error) {
	plain, err := decompress(data, 0)
	if err != nil {
		return Config{}, "", err
	}
	return decodeText(plain)
}

// decodeText is Decode for the JSON text.
func decodeText(plain []byte) (c Config, revision string, err error) {
	revision = revisionOf(plain)
	err = unmarshal(plain, &c)
	if errors.Is(err, errTrailing) && c.Version == FormatVersion {
		return Config{}, revision, err
	}
	if err != nil || c.Version != FormatVersion {
		// The error for another format should name the version and not an unknown field.
		var head struct {
			Version int `json:"version"`
		}
		if err := json.Unmarshal(plain, &head); err != nil {
			return Config{}, revision, fmt.Errorf("live config is not JSON: %w", redactJSONError(err))
		}
		if head.Version != FormatVersion {
			return Config{}, revision, fmt.Errorf("live config has format version %d; this dispatcher knows version %d: run the operator and the dispatcher from the same image", head.Version, FormatVersion)
		}
		return Config{}, revision, fmt.Errorf("live config does not match the format: %w", redactJSONError(err))
	}
	if err := c.Validate(); err != nil {
		return Config{}, revision, err
	}
	return c, revision, nil
}

// UnknownField is the beginning of the revision of a destination that has a field of a newer release. It is paused, so that its
// messages wait for a dispatcher that knows the field, and the other objects of the namespace remain in effect.
const UnknownField = "unknown-field-"

// UnmarshalJSON implements json.Unmarshaler.
func (d *Destination) UnmarshalJSON(text []byte) error {
	type plain Destination
	var strict plain
	err := unmarshal(text, &strict)
	if err == nil || !strings.HasPrefix(err.Error(), "json: unknown field ") {
		*d = Destination(strict)
		return err
	}
	var known plain
	if err := json.Unmarshal(text, &known); err != nil {
		return err
	}
	*d = Destination(known)
	d.Revision = UnknownField + d.Revision
	if d.State == Active {
		d.State, d.PausedReason = Paused, "DispatcherTooOld"
	}
	return nil
}

var errTrailing = errors.New("live config has trailing data")

// unmarshal decodes a JSON text. Unknown fields and trailing data are errors.
func unmarshal(text []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errTrailing
	}
	return nil
}

// redactJSONError removes the offending value, which may be a secret.
func redactJSONError(err error) error {
	if typeErr, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("field %s must not hold a value of another type than %s", typeErr.Field, typeErr.Type)
	}
	return err
}

// Validate checks rules that the format's types cannot express: names, limits, and that an active
// destination has everything for a delivery. Its errors name the object and the field and contain
// no secrets.
func (c Config) Validate() error { return c.validate(nil) }

// validate is Validate. valid reports, by position, whether a destination is known to be valid except for its
// name and Sources; nil if none is.
func (c Config) validate(valid []bool) error {
	if c.Namespace == "" {
		return errors.New("live config: the namespace is empty")
	}
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	named := func(others map[string]bool, kind, name string) {
		if name == "" || others[name] {
			fail("%s %q: name is empty or not unique", kind, name)
		}
		others[name] = true
	}
	sources := map[string]bool{}
	keys := map[string]string{}
	for _, s := range c.Sources {
		named(sources, "source", s.Name)
		for _, hash := range s.WriteKeySHA256 {
			if b, err := hex.DecodeString(hash); err != nil || len(b) != sha256.Size {
				fail("source %q: writeKeySHA256 must be %d hex digits", s.Name, 2*sha256.Size)
			}
			if other, ok := keys[hash]; ok {
				fail("source %q: same write key as source %q", s.Name, other)
			}
			keys[hash] = s.Name
		}
	}
	names := map[string]bool{}
	for i, d := range c.Destinations {
		named(names, "destination", d.Name)
		err := d.validateSources(sources)
		if err == nil && (valid == nil || !valid[i]) {
			err = d.validate()
		}
		if err != nil {
			fail("destination %q: %w", d.Name, err)
		}
	}
	ids := map[string]bool{}
	identified := func(kind, name, id string) {
		if b, err := hex.DecodeString(id); err != nil || len(b) == 0 || len(id) > 64 || ids[id] {
			fail("%s %q: id must be up to 64 hex digits and unique", kind, name)
		}
		ids[id] = true
	}
	redeliveries := map[string]bool{}
	for _, r := range c.Redeliveries {
		named(redeliveries, "redelivery", r.Name)
		identified("redelivery", r.Name, r.ID)
		if err := r.validate(); err != nil {
			fail("redelivery %q: %w", r.Name, err)
		}
	}
	deletions := map[string]bool{}
	for _, d := range c.Deletions {
		named(deletions, "deletion", d.Name)
		if d.ID == "" {
			continue
		}
		identified("deletion", d.Name, d.ID)
		if d.UserID == "" {
			fail("deletion %q: userId is empty", d.Name)
		}
	}
	audiences, traits := map[string]bool{}, map[[2]string]bool{}
	for _, a := range c.Audiences {
		named(audiences, "audience", a.Name)
		if a.Kind != KindAudience && a.Kind != KindComputedTrait {
			fail("audience %q: kind %q is unknown", a.Name, a.Kind)
		}
		if a.Key == "" {
			continue
		}
		if !sources[a.Source] {
			fail("audience %q: source %q does not exist", a.Name, a.Source)
		}
		if id := [2]string{a.Source, a.Key}; traits[id] {
			fail("audience %q: key %q is not unique among the audiences of source %q", a.Name, a.Key, a.Source)
		} else {
			traits[id] = true
		}
	}
	return errors.Join(errs...)
}

func (r Redelivery) validate() error {
	switch r.Phase {
	case RedeliveryBegin, RedeliveryRun, RedeliveryRecord:
	default:
		return fmt.Errorf("phase %q is unknown", r.Phase)
	}
	switch {
	case r.Destination == "":
		return errors.New("destination is empty")
	case r.Rate <= 0:
		return errors.New("rate must be positive")
	case r.Phase != RedeliveryBegin && r.Until.IsZero():
		return errors.New("until is zero in a run that has started")
	}
	return nil
}

func (d Destination) validateSources(sources map[string]bool) error {
	for _, s := range d.Sources {
		if !sources[s] && !BuiltIn(s) {
			return fmt.Errorf("source %q does not exist", s)
		}
	}
	return nil
}

func (d Destination) validate() error {
	switch d.State {
	case Active, Suspended, Paused:
	default:
		return fmt.Errorf("state %q is unknown", d.State)
	}
	if d.Success != AnyEndpoint && d.Success != EveryEndpoint {
		return fmt.Errorf("success %q is unknown", d.Success)
	}
	p := d.Delivery
	if p.RetryWindowMS < 1 || p.RetryWindow() > MaxRetryWindow {
		return fmt.Errorf("delivery.retryWindowMS must be between 1 ms and %v", MaxRetryWindow)
	}
	endpoints := map[string]bool{}
	for _, e := range d.Endpoints {
		if e.Name == "" || endpoints[e.Name] {
			return fmt.Errorf("endpoint %q: name is empty or not unique", e.Name)
		}
		endpoints[e.Name] = true
	}
	if d.State != Active {
		return nil
	}
	if n := len(d.Endpoints); n < 1 || n > 5 {
		return fmt.Errorf("%d endpoints; 1 to 5 are allowed", n)
	}
	if p.TimeoutMS < 1 || p.Timeout() > MaxTimeout {
		return fmt.Errorf("delivery.timeoutMS must be between 1 ms and %v", MaxTimeout)
	}
	if p.MinBackoffMS < 1 || p.MaxBackoffMS < p.MinBackoffMS {
		return errors.New("delivery backoff must be positive, minBackoffMS not above maxBackoffMS")
	}
	if slices.ContainsFunc(p.RetryStatusCodes, func(code int) bool { return code < 300 || code > 499 }) {
		return errors.New("delivery.retryStatusCodes must be from 300 to 499")
	}
	if err := d.Request.validate(); err != nil {
		return fmt.Errorf("request: %w", err)
	}
	if err := d.Batch.validate(); err != nil {
		return fmt.Errorf("batch: %w", err)
	}
	if p.MaxInFlight < 1 || p.MaxInFlight > MaxInFlight {
		return fmt.Errorf("delivery.maxInFlight must be between 1 and %d", MaxInFlight)
	}
	if d.SuccessRule != nil && d.SuccessRule.Expression == "" {
		return errors.New("successRule.expression is empty")
	}
	if d.Redact != nil && d.Redact.Hash != nil && d.Redact.Hash.Key.IsZero() {
		return errors.New("redact.hash: key is empty")
	}
	for _, e := range d.Endpoints {
		u, err := url.Parse(e.URL.Reveal())
		if err != nil || !slices.Contains([]string{"http", "https"}, u.Scheme) || u.Hostname() == "" {
			return fmt.Errorf("endpoint %q: url is not a full http or https URL", e.Name)
		}
		if err := e.OAuth2.validate(); err != nil {
			return fmt.Errorf("endpoint %q: oauth2: %w", e.Name, err)
		}
	}
	return d.Signing.validate()
}

func (o *OAuth2) validate() error {
	if o == nil {
		return nil
	}
	u, err := url.Parse(o.TokenURL)
	switch {
	case err != nil || !slices.Contains([]string{"http", "https"}, u.Scheme) || u.Hostname() == "":
		return errors.New("tokenURL is not a full http or https URL")
	case o.ClientID == "":
		return errors.New("clientID is empty")
	case o.ClientSecret.IsZero():
		return errors.New("clientSecret is empty")
	}
	return nil
}

func (r *Request) validate() error {
	if r == nil {
		return nil
	}
	if !slices.Contains([]string{"", ContentForm, ContentText, ContentCloudEvents}, r.ContentType) {
		return fmt.Errorf("contentType %q is unknown", r.ContentType)
	}
	if !slices.Contains([]string{"", "PUT", "PATCH", "DELETE"}, r.Method) {
		return fmt.Errorf("method %q is unknown", r.Method)
	}
	for _, h := range r.Headers {
		if h.Name == "" || IsReservedHeader(h.Name) {
			return fmt.Errorf("header %q is set by Posthorn or by HTTP itself", h.Name)
		}
	}
	return nil
}

func (b *Batch) validate() error {
	switch {
	case b == nil:
		return nil
	case b.MaxMessages < 2 || b.MaxMessages > MaxBatchMessages:
		return fmt.Errorf("maxMessages must be between 2 and %d", MaxBatchMessages)
	case b.MaxBytes < MinBatchBytes || b.MaxBytes > MaxBatchBytes:
		return fmt.Errorf("maxBytes must be between %d and %d", MinBatchBytes, MaxBatchBytes)
	case b.MaxDelayMS < 0 || b.MaxDelay() > MaxBatchDelay:
		return fmt.Errorf("maxDelayMS must be between 0 and %v", MaxBatchDelay)
	case b.Format != BatchJSONArray && b.Format != BatchNDJSON:
		return fmt.Errorf("format %q is unknown", b.Format)
	}
	return nil
}

func (s SigningSchemes) validate() error {
	headers := map[string]bool{}
	for _, scheme := range s {
		switch {
		case scheme.Type == HMAC && scheme.Format == nil:
			return fmt.Errorf("signing scheme %q has no format", scheme.Name)
		case scheme.Type == HMAC:
			if err := scheme.Format.Validate(); err != nil {
				return fmt.Errorf("signing scheme %q: %w", scheme.Name, err)
			}
		case scheme.Type != HMACSHA1 && scheme.Type != StandardWebhooks:
			return fmt.Errorf("signing scheme %q has the unknown type %q", scheme.Name, scheme.Type)
		}
		if headers[scheme.Writes()] {
			return fmt.Errorf("signing scheme %q writes the header of another scheme", scheme.Name)
		}
		headers[scheme.Writes()] = true
		// An empty key would make signatures that prove nothing.
		if scheme.Secret.IsZero() {
			return fmt.Errorf("signing scheme %q: secret is empty", scheme.Name)
		}
	}
	return nil
}
