package compile

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
)

const maxEndpoints = 5

// Destinations are the kind WebhookDestination.
var Destinations = NewKind(Definition[*v1beta1.WebhookDestination, liveconfig.Destination]{
	Section: sectionDestinations,
	Entries: func(c *liveconfig.Config) *[]liveconfig.Destination { return &c.Destinations },
	ID:      func(e liveconfig.Destination) (string, string) { return e.Name, e.Revision },
	Compiler: func(s Snapshot, _ liveconfig.Config, _ Verdicts,
		objects []*v1beta1.WebhookDestination) func(*v1beta1.WebhookDestination) (liveconfig.Destination, bool, Verdict) {
		sources := objectsOf[*v1beta1.Source](s)
		if s.Memo != nil {
			s.Memo.begin(sources)
		}
		results := map[string]destinationMemo{}
		for _, o := range objects {
			r := s.Memo.destination(s, o, sources, objects)
			if over := s.ExpressionsOver[o.Name]; over != "" && r.size != (expression.Size{}) {
				r.refuseExpression(over)
			}
			results[o.Name] = r
		}
		return func(o *v1beta1.WebhookDestination) (liveconfig.Destination, bool, Verdict) {
			r := results[o.Name]
			return r.entry, true, r.verdict
		}
	},
	SecretRefs: secretsOfDestination,
	Weight:     weight,
	Pause: func(d liveconfig.Destination) liveconfig.Destination {
		generation := d.Generation
		d.Endpoints, d.Signing, d.Revision, d.Generation = nil, nil, "", 0
		if d.State == liveconfig.Active {
			d.State, d.PausedReason = liveconfig.Paused, v1beta1.ReasonConfigTooLarge
		}
		d.Revision, d.Generation = revision(d, nil, nil), generation
		return d
	},
})

func secretsOfDestination(o *v1beta1.WebhookDestination) (names []string) {
	for i := range o.Spec.Endpoints {
		e := &o.Spec.Endpoints[i]
		if e.URLFrom != nil {
			names = append(names, e.URLFrom.SecretKeyRef.Name)
		}
		for _, h := range e.Headers {
			if h.ValueFrom != nil {
				names = append(names, h.ValueFrom.SecretKeyRef.Name)
			}
		}
		names = append(names, secretsOfTLS(e.TLS)...)
		names = append(names, secretsOfAuthentication(e.Authentication)...)
	}
	if signing := o.Spec.Signing; signing != nil {
		for i := range signing.Schemes {
			scheme := &signing.Schemes[i]
			names = append(names, scheme.SecretKeyRef.Name)
			if scheme.PreviousSecretKeyRef != nil {
				names = append(names, scheme.PreviousSecretKeyRef.Name)
			}
		}
	}
	if r := o.Spec.Redact; r != nil && r.Hash != nil {
		names = append(names, r.Hash.SecretKeyRef.Name)
	}
	return names
}

func secretsOfTLS(t *v1beta1.EndpointTLS) (names []string) {
	if t != nil && t.CA != nil && t.CA.SecretKeyRef != nil {
		names = append(names, t.CA.SecretKeyRef.Name)
	}
	if t != nil && t.CA != nil && t.CA.ConfigMapKeyRef != nil {
		names = append(names, ConfigMapName(t.CA.ConfigMapKeyRef.Name))
	}
	if t != nil && t.ClientCertSecretRef != nil {
		names = append(names, t.ClientCertSecretRef.Name)
	}
	return names
}

// destination compiles one WebhookDestination. Sources are sorted by name, and all are the
// destinations of the namespace. It also returns the versions of the Secrets that it has used.
func (s Snapshot) destination(o *v1beta1.WebhookDestination, sources []*v1beta1.Source,
	all []*v1beta1.WebhookDestination) destinationMemo {
	b := builder{resolver: newResolver(s.Secrets), policy: s.Policy}
	c := liveconfig.Destination{
		Name:            o.Name,
		Sources:         b.sources(o.Spec.SourceRefs, o.Spec.SourceSelector, sources),
		Endpoints:       b.endpoints(o.Spec.Endpoints),
		Signing:         b.signing(o.Spec.Signing),
		Success:         b.successPolicy(o.Spec.SuccessPolicy),
		SuccessRule:     b.successRule(o.Spec.Success),
		ExactNumbers:    b.exactNumbers(o.Spec.Body.Numbers),
		IgnoreDeletions: o.Spec.Deletions == v1beta1.IgnoreDeletions,
		Delivery:        b.delivery(o.Spec.Delivery),
		Filter:          b.messages(o.Spec.Filter, o.Spec.Deletions),
		Request:         b.request(o.Spec.Request),
		Batch:           b.batch(o.Spec.Delivery.Batch),
		DeadLetters:     b.deadLetters(o.Spec.DeadLetters),
		Redact:          b.redact(o.Spec.Redact, o.Spec.Deletions),
	}
	c.SourcesUnknown = b.sourcesUnknown
	b.compress(c.Endpoints, o.Spec.Delivery.Compression)
	b.checkHeaderCollisions(o.Spec.Endpoints, c.Signing)
	b.checkRequestHeaders(c.Request, o.Spec.Endpoints, c.Signing)
	b.checkBatch(c.Batch, c.Request, c.Delivery.RetryWindow())
	c.DeadLetters.ForwardTo = b.forwardTo(o, all)
	v := Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted,
		Message: strings.Join(append([]string{"the spec is valid"}, b.notes...), "; ")}
	c.State = liveconfig.Active
	if len(b.problems) > 0 {
		b.apply(&v, "")
		if reason, _ := v.Cause(); !slices.Contains(v1beta1.ReasonsWithDelivery, reason) || len(c.Sources) == 0 {
			c.State, c.PausedReason = liveconfig.Paused, reason
		}
	}
	if ptr.Deref(o.Spec.Suspend, false) {
		c.State, c.PausedReason = liveconfig.Suspended, ""
		if v.Accepted {
			v.Reason, v.Message = v1beta1.ReasonSuspended, "spec.suspend is true: messages wait and keep their space on the disk, and the time does not count towards their retry windows"
		}
	}
	v.State = c.State
	c.Revision = revision(c, b.used, b.literals)
	c.Generation = o.Generation
	v.Revision = c.Revision
	return destinationMemo{entry: c, verdict: v, used: b.used, size: b.expression}
}

// builder compiles the parts of a destination's spec.
type builder struct {
	*resolver
	policy Policy
	// literals are the URLs and header values that the spec contains as plain text.
	literals []string
	// expression is the size of all expressions.
	expression expression.Size
	// sourcesUnknown means that the spec does not give the Sources in a valid form.
	sourcesUnknown bool
}

// sources returns the sorted names of the existing Sources that the spec refers to or selects.
func (b *builder) sources(refs []v1beta1.SourceReference, labelSelector *metav1.LabelSelector, sources []*v1beta1.Source) []string {
	var names []string
	switch {
	case (labelSelector != nil) == (len(refs) > 0):
		b.sourcesUnknown = true
		b.add(v1beta1.ReasonInvalidSpec, "spec", "set exactly one of sourceRefs and sourceSelector; until then messages are kept, not sent")
	case labelSelector != nil:
		selector, err := metav1.LabelSelectorAsSelector(labelSelector)
		if err != nil {
			b.sourcesUnknown = true
			b.add(v1beta1.ReasonInvalidSpec, "spec.sourceSelector", "%v; use In, NotIn, Exists or DoesNotExist, and valid label keys and values", err)
			return nil
		}
		for _, source := range sources {
			if selector.Matches(labels.Set(source.Labels)) {
				names = append(names, source.Name)
			}
		}
		if len(names) == 0 {
			b.add(v1beta1.ReasonNoSource, "spec.sourceSelector", "no Source in this namespace matches; create one or change its labels or the selector")
		}
	default:
		var missing []string
		for _, ref := range refs {
			name := ref.Name
			if liveconfig.BuiltIn(name) || slices.ContainsFunc(sources, func(s *v1beta1.Source) bool { return s.Name == name }) {
				names = append(names, name)
			} else {
				missing = append(missing, fmt.Sprintf("%q", name))
			}
		}
		slices.Sort(names)
		names = slices.Compact(names)
		if len(missing) > 0 {
			slices.Sort(missing)
			text := "no Source in this namespace is named " + strings.Join(slices.Compact(missing), ", ") + "; create it or change the reference"
			if len(names) > 0 {
				text += " (calls of the other Sources are delivered)"
			}
			b.add(v1beta1.ReasonNoSource, "spec.sourceRefs", "%s", text)
		}
	}
	return names
}

func (b *builder) endpoints(endpoints []v1beta1.Endpoint) []liveconfig.Endpoint {
	if n := len(endpoints); n < 1 || n > maxEndpoints {
		b.add(v1beta1.ReasonInvalidSpec, "spec.endpoints", "%d endpoints; set 1 to %d", n, maxEndpoints)
	}
	var compiled []liveconfig.Endpoint
	for i := range endpoints {
		e := &endpoints[i]
		if e.Name == "" || slices.ContainsFunc(compiled, func(c liveconfig.Endpoint) bool { return c.Name == e.Name }) {
			b.add(v1beta1.ReasonInvalidSpec, fmt.Sprintf("spec.endpoints[%d].name", i),
				"%q is empty or not unique; give each endpoint its own name", e.Name)
			continue
		}
		compiled = append(compiled, b.endpoint(fmt.Sprintf("spec.endpoints[%s]", e.Name), e))
	}
	return compiled
}

func (b *builder) endpoint(field string, e *v1beta1.Endpoint) liveconfig.Endpoint {
	c := liveconfig.Endpoint{Name: e.Name}
	https := false
	c.URL, https = b.url(field, e)
	c.Headers = b.headers(field+".headers", e.Headers)
	if e.TLS != nil {
		if !c.URL.IsZero() && !https {
			b.add(v1beta1.ReasonInvalidURL, field+".tls", "tls requires an https:// URL; change the URL or remove tls")
		}
		c.TLS = b.tls(field+".tls", e.TLS)
	}
	b.authentication(field+".authentication", e.Authentication, &c)
	return c
}

// url returns the URL of an endpoint; it is empty if the URL is invalid.
func (b *builder) url(field string, e *v1beta1.Endpoint) (out liveconfig.Secret, https bool) {
	if (e.URL == "") == (e.URLFrom == nil) {
		b.add(v1beta1.ReasonInvalidSpec, field, "set exactly one of url and urlFrom")
		return out, false
	}
	text, fromSecret := e.URL, e.URLFrom != nil
	if fromSecret {
		field += ".urlFrom.secretKeyRef"
		value, ok := b.text(field, e.URLFrom.SecretKeyRef)
		if !ok {
			return out, false
		}
		text = strings.TrimSpace(value)
	} else {
		field += ".url"
		b.literals = append(b.literals, field, text)
	}
	u, broken := checkURL(text)
	if broken != "" {
		if fromSecret {
			broken = fmt.Sprintf("the URL in key %q of Secret %q %s", e.URLFrom.SecretKeyRef.Key, e.URLFrom.SecretKeyRef.Name, broken)
		}
		b.add(v1beta1.ReasonInvalidURL, field, "%s", broken)
		return out, false
	}
	if b.policy.CheckHost != nil {
		if err := b.policy.CheckHost(u.Hostname()); err != nil {
			reason := err.Error()
			if fromSecret {
				// The error contains the host, which is part of the secret.
				reason = "deliveries to the URL's host are denied; use another URL, or ask an administrator to allow the host (--egress-allow)"
			}
			b.add(v1beta1.ReasonEgressDenied, field, "%s", reason)
		}
	}
	return liveconfig.NewSecret(text), u.Scheme == "https"
}

func (b *builder) headers(field string, headers []v1beta1.Header) []liveconfig.Header {
	if n := len(headers); n > maxHeaders {
		b.add(v1beta1.ReasonInvalidSpec, field, "%d headers; at most %d are allowed", n, maxHeaders)
	}
	var compiled []liveconfig.Header
	for i := range headers {
		h := &headers[i]
		field := fmt.Sprintf("%s[%s]", field, h.Name)
		if broken := checkHeaderName(h.Name); broken != "" {
			b.add(v1beta1.ReasonInvalidSpec, field+".name", "%s", broken)
			continue
		}
		if slices.ContainsFunc(compiled, func(c liveconfig.Header) bool { return strings.EqualFold(c.Name, h.Name) }) {
			b.add(v1beta1.ReasonInvalidSpec, field+".name", "header names must be unique, regardless of case; remove one")
			continue
		}
		if (h.Value == nil) == (h.ValueFrom == nil) {
			b.add(v1beta1.ReasonInvalidSpec, field, "set exactly one of value and valueFrom")
			continue
		}
		var value string
		if h.Value != nil {
			value = *h.Value
			b.literals = append(b.literals, field, value)
			if broken := checkHeaderValue(value); broken != "" {
				b.add(v1beta1.ReasonInvalidSpec, field+".value", "%s", broken)
			}
		} else {
			ref := h.ValueFrom.SecretKeyRef
			var ok bool
			if value, ok = b.text(field+".valueFrom.secretKeyRef", ref); !ok {
				continue
			}
			if broken := checkHeaderValue(value); broken != "" {
				b.add(v1beta1.ReasonInvalidSecret, field+".valueFrom.secretKeyRef", "the value in key %q of Secret %q %s", ref.Key, ref.Name, broken)
				continue
			}
		}
		compiled = append(compiled, liveconfig.Header{Name: h.Name, Value: liveconfig.NewSecret(value)})
	}
	return compiled
}

func (b *builder) tls(field string, t *v1beta1.EndpointTLS) *liveconfig.TLS {
	if t == nil {
		return nil
	}
	c := &liveconfig.TLS{}
	if t.CA != nil {
		c.CA = b.authorities(field+".ca", *t.CA)
	}
	if ref := t.ClientCertSecretRef; ref != nil {
		field := field + ".clientCertSecretRef"
		if secret, ok := b.secret(field, ref.Name); ok {
			cert, certOK := b.key(field, ref.Name, secret, corev1.TLSCertKey)
			key, keyOK := b.key(field, ref.Name, secret, corev1.TLSPrivateKeyKey)
			if certOK && keyOK {
				certPEM, keyPEM, broken := clientCertificate(cert, key)
				if broken != "" {
					b.add(v1beta1.ReasonInvalidSecret, field, "Secret %q: %s", ref.Name, broken)
				}
				c.ClientCert, c.ClientKey = certPEM, liveconfig.NewSecret(keyPEM)
			}
		}
	}
	if *c == (liveconfig.TLS{}) {
		return nil
	}
	return c
}

// authorities returns the CA certificates of a Secret or a ConfigMap.
func (b *builder) authorities(field string, ca v1beta1.CertificateAuthorities) (certificates string) {
	var name, key string
	switch secret, configMap := ca.SecretKeyRef, ca.ConfigMapKeyRef; {
	case (secret == nil) == (configMap == nil):
		b.add(v1beta1.ReasonInvalidSpec, field, "set exactly one of secretKeyRef and configMapKeyRef")
		return ""
	case secret != nil:
		field, name, key = field+".secretKeyRef", secret.Name, secret.Key
	default:
		field, name, key = field+".configMapKeyRef", ConfigMapName(configMap.Name), configMap.Key
	}
	if values, ok := b.secret(field, name); ok {
		if value, ok := b.key(field, name, values, key); ok {
			var broken string
			if certificates, broken = authorities(value); broken != "" {
				k, name := valueKindOf(name)
				b.add(k.invalid, field, "key %q of %s %q %s", key, k.kind, name, broken)
			}
		}
	}
	return certificates
}

const maxSigningSchemes = 4

// signing returns the signing schemes; none means unsigned requests. An invalid scheme is
// a problem, which pauses the destination, so that nothing is sent unsigned by mistake.
func (b *builder) signing(signing *v1beta1.Signing) liveconfig.SigningSchemes {
	if signing == nil {
		return nil
	}
	if n := len(signing.Schemes); n < 1 || n > maxSigningSchemes {
		b.add(v1beta1.ReasonInvalidSpec, "spec.signing.schemes", "has %d entries; set 1 to %d, or remove spec.signing for unsigned requests", n, maxSigningSchemes)
	}
	var compiled liveconfig.SigningSchemes
	for i := range signing.Schemes {
		s := &signing.Schemes[i]
		field := fmt.Sprintf("spec.signing.schemes[%s]", s.Name)
		switch s.Type {
		case v1beta1.HMACSHA1, v1beta1.StandardWebhooks, v1beta1.HMAC:
		default:
			b.add(v1beta1.ReasonInvalidSpec, field+".type", "%q is unknown; use %s, %s or %s", s.Type,
				v1beta1.HMACSHA1, v1beta1.StandardWebhooks, v1beta1.HMAC)
			continue
		}
		c := liveconfig.SigningScheme{Name: s.Name, Type: string(s.Type), Format: b.hmacFormat(field+".hmac", s)}
		if other := slices.IndexFunc(compiled, func(o liveconfig.SigningScheme) bool {
			return o.Writes() == c.Writes() || o.Name == c.Name
		}); other >= 0 {
			b.add(v1beta1.ReasonInvalidSpec, field, "the scheme %q has the same name or header; change or remove one", compiled[other].Name)
			continue
		}
		c.Secret = b.sharedSecret(field+".secretKeyRef", c.Type, s.SecretKeyRef)
		if s.PreviousSecretKeyRef != nil {
			c.Previous = b.sharedSecret(field+".previousSecretKeyRef", c.Type, *s.PreviousSecretKeyRef)
		}
		compiled = append(compiled, c)
	}
	slices.SortFunc(compiled, func(a, b liveconfig.SigningScheme) int { return strings.Compare(a.Name, b.Name) })
	return compiled
}

// hmacFormat returns the format of a scheme of the type HMAC, and nil for the other types.
func (b *builder) hmacFormat(field string, s *v1beta1.SigningScheme) *liveconfig.HMACFormat {
	if (s.Type == v1beta1.HMAC) != (s.HMAC != nil) {
		b.add(v1beta1.ReasonInvalidSpec, field, "belongs to the type %s, and is required with it", v1beta1.HMAC)
		return nil
	}
	if s.HMAC == nil {
		return nil
	}
	f := &liveconfig.HMACFormat{
		Header:        s.HMAC.Header,
		Algorithm:     cmp.Or(string(s.HMAC.Algorithm), liveconfig.SHA256),
		Encoding:      cmp.Or(string(s.HMAC.Encoding), liveconfig.Hex),
		Content:       cmp.Or(string(s.HMAC.Content), liveconfig.SignBody),
		Value:         cmp.Or(s.HMAC.Value, liveconfig.PlaceholderSignature),
		PreviousValue: s.HMAC.PreviousValue,
	}
	if err := f.Validate(); err != nil {
		b.add(v1beta1.ReasonInvalidSpec, field, "%s", err)
	} else if rule := checkHeaderName(f.Header); rule != "" {
		b.add(v1beta1.ReasonInvalidSpec, field+".header", "%s", rule)
	}
	return f
}

// checkHeaderCollisions reports the headers of endpoints that a signing scheme sets.
func (b *builder) checkHeaderCollisions(endpoints []v1beta1.Endpoint, schemes liveconfig.SigningSchemes) {
	for _, s := range schemes {
		if s.Format == nil {
			continue
		}
		for _, e := range endpoints {
			if e.Authentication != nil && strings.EqualFold(s.Format.Header, headerAuthorization) {
				b.add(v1beta1.ReasonInvalidSpec, fmt.Sprintf("spec.endpoints[%s].authentication", e.Name), "the signing scheme %q also sets the header %s; remove one or choose another name there", s.Name, headerAuthorization)
			}
			for _, h := range e.Headers {
				if strings.EqualFold(h.Name, s.Format.Header) || strings.EqualFold(h.Name, s.Format.Header+"-Previous") {
					b.add(v1beta1.ReasonInvalidSpec, fmt.Sprintf("spec.endpoints[%s].headers[%s]", e.Name, h.Name), "the signing scheme %q sets this header; remove it here or choose another name there", s.Name)
				}
			}
		}
	}
}

const maxSharedSecretBytes = 4096

// sharedSecret returns a shared secret. Spaces are part of it.
func (b *builder) sharedSecret(field, scheme string, ref v1beta1.SecretKeyReference) liveconfig.Secret {
	value, ok := b.text(field, ref)
	if !ok {
		return liveconfig.Secret{}
	}
	if len(value) > maxSharedSecretBytes {
		b.add(v1beta1.ReasonInvalidSecret, field, "key %q of Secret %q has more than %d bytes; use a shorter secret", ref.Key, ref.Name, maxSharedSecretBytes)
		return liveconfig.Secret{}
	}
	if encoded, prefixed := strings.CutPrefix(value, "whsec_"); prefixed && scheme == liveconfig.StandardWebhooks {
		if raw, err := base64.StdEncoding.DecodeString(encoded); err != nil || len(raw) == 0 {
			b.add(v1beta1.ReasonInvalidSecret, field, "the text after whsec_ in key %q of Secret %q is not base64; copy the complete secret with its padding", ref.Key, ref.Name)
			return liveconfig.Secret{}
		}
	} else if scheme == liveconfig.StandardWebhooks {
		b.notes = append(b.notes, fmt.Sprintf("%s: key %q of Secret %q does not begin with whsec_; the libraries of Standard Webhooks require it, followed by base64", field, ref.Key, ref.Name))
	}
	return liveconfig.NewSecret(value)
}

// messages returns the filter of calls.
func (b *builder) messages(f *v1beta1.Filter, policy v1beta1.DeletionPolicy) *liveconfig.Filter {
	switch policy {
	case "", v1beta1.DeliverDeletions, v1beta1.IgnoreDeletions:
	case v1beta1.OnlyDeletions:
		if f != nil {
			b.add(v1beta1.ReasonInvalidSpec, "spec.filter", "with deletions: Only no calls are delivered; remove filter, or deletions")
		}
		return &liveconfig.Filter{Types: []string{"delete"}} // No call has this type.
	default:
		b.add(v1beta1.ReasonInvalidSpec, "spec.deletions", "%q is unknown; use %s, %s or %s", policy, v1beta1.DeliverDeletions,
			v1beta1.OnlyDeletions, v1beta1.IgnoreDeletions)
	}
	return b.filter(f)
}

func (b *builder) successPolicy(policy v1beta1.SuccessPolicy) string {
	switch policy {
	case "", v1beta1.AnyEndpoint:
	case v1beta1.EveryEndpoint:
		return liveconfig.EveryEndpoint
	default:
		b.add(v1beta1.ReasonInvalidSpec, "spec.successPolicy", "%q is unknown; use %s or %s", policy, v1beta1.AnyEndpoint,
			v1beta1.EveryEndpoint)
	}
	return liveconfig.AnyEndpoint
}

func (b *builder) exactNumbers(format v1beta1.NumberFormat) bool {
	switch format {
	case "", v1beta1.NumbersString:
	case v1beta1.NumbersExact:
		return true
	default:
		b.add(v1beta1.ReasonInvalidSpec, "spec.body.numbers", "%q is unknown; use %s or %s", format, v1beta1.NumbersString,
			v1beta1.NumbersExact)
	}
	return false
}

// compress sets the compression of the bodies of endpoints.
func (b *builder) compress(endpoints []liveconfig.Endpoint, compression v1beta1.Compression) {
	switch compression {
	case "", v1beta1.CompressionNone:
	case v1beta1.CompressionGZip:
		for i := range endpoints {
			endpoints[i].GZip = true
		}
	default:
		b.add(v1beta1.ReasonInvalidSpec, "spec.delivery.compression", "%q is unknown; set %s or %s", compression, v1beta1.CompressionNone,
			v1beta1.CompressionGZip)
	}
}

// batch returns the limits and the form of batches.
func (b *builder) batch(s *v1beta1.Batch) *liveconfig.Batch {
	if s == nil {
		return nil
	}
	const field = "spec.delivery.batch"
	c := &liveconfig.Batch{
		MaxMessages: 100, MaxBytes: 1 << 20, MaxDelayMS: b.milliseconds(field+".maxDelay", s.MaxDelay, time.Second, 0, liveconfig.MaxBatchDelay),
		Format: cmp.Or(string(s.Format), liveconfig.BatchJSONArray), PerItem: s.Response == v1beta1.BatchResponsePerItem,
	}
	if s.MaxMessages != 0 {
		if c.MaxMessages = int(min(max(s.MaxMessages, 2), liveconfig.MaxBatchMessages)); c.MaxMessages != int(s.MaxMessages) {
			b.add(v1beta1.ReasonInvalidSpec, field+".maxMessages", "must be between 2 and %d", liveconfig.MaxBatchMessages)
		}
	}
	if s.MaxBytes != nil {
		if s.MaxBytes.CmpInt64(liveconfig.MinBatchBytes) < 0 || s.MaxBytes.CmpInt64(liveconfig.MaxBatchBytes) > 0 {
			b.add(v1beta1.ReasonInvalidSpec, field+".maxBytes", "must be between 1Ki and 4Mi")
		} else {
			c.MaxBytes = s.MaxBytes.Value()
		}
	}
	if c.Format != liveconfig.BatchJSONArray && c.Format != liveconfig.BatchNDJSON {
		b.add(v1beta1.ReasonInvalidSpec, field+".format", "%q is unknown; use %s or %s", c.Format,
			liveconfig.BatchJSONArray, liveconfig.BatchNDJSON)
		c.Format = liveconfig.BatchJSONArray
	}
	switch s.Response {
	case "", v1beta1.BatchResponseWhole, v1beta1.BatchResponsePerItem:
	default:
		b.add(v1beta1.ReasonInvalidSpec, field+".response", "%q is unknown; use %s or %s", s.Response, v1beta1.BatchResponseWhole,
			v1beta1.BatchResponsePerItem)
	}
	return c
}

// namesMessage matches expressions that have the id of a message, or the whole call.
var namesMessage = regexp.MustCompile(`messageId|\bcall([^.\w]|$)`)

// checkBatch reports what a batch excludes.
func (b *builder) checkBatch(c *liveconfig.Batch, r *liveconfig.Request, window time.Duration) {
	if c == nil {
		return
	}
	if c.MaxDelay() >= window {
		b.add(v1beta1.ReasonInvalidSpec, "spec.delivery.batch.maxDelay", "%v must be shorter than the retry window of %v, or messages expire before they are sent; lower it (default 1s), or raise spec.delivery.retry.window",
			c.MaxDelay(), window)
	}
	if r == nil {
		return
	}
	if r.Body != "" && !namesMessage.MatchString(r.Body) {
		b.notes = append(b.notes, "spec.request.body does not contain call.messageId, by which receivers of batches recognize duplicates")
	}
	if r.Path != "" || r.Query != "" || len(r.Headers) > 0 {
		b.add(v1beta1.ReasonInvalidSpec, "spec.request", "path, query and headers cannot be used with spec.delivery.batch: a batch is one request, so its messages differ by their bodies only; remove them, or delivery.batch")
	}
	switch r.ContentType {
	case liveconfig.ContentForm, liveconfig.ContentText:
		b.add(v1beta1.ReasonInvalidSpec, "spec.request.contentType", "%s cannot be used with spec.delivery.batch, because a batch is a list of JSON values; use JSON or CloudEvents, or remove delivery.batch", r.ContentType)
	case liveconfig.ContentCloudEvents:
		if c.Format == liveconfig.BatchNDJSON {
			b.add(v1beta1.ReasonInvalidSpec, "spec.delivery.batch.format", "a batch of CloudEvents is a JSON array; use JSONArray, or set spec.request.contentType to JSON")
		}
	}
}

func (b *builder) delivery(d v1beta1.Delivery) liveconfig.Delivery {
	c := liveconfig.Delivery{
		TimeoutMS: b.upTo(b.policy.maxTimeout(), "--max-delivery-timeout", "spec.delivery.timeout", d.Timeout, DefaultMaxTimeout,
			100*time.Millisecond, liveconfig.MaxTimeout),
		RetryWindowMS: b.upTo(b.policy.maxRetryWindow(), "--max-retry-window", "spec.delivery.retry.window", d.Retry.Window,
			DefaultMaxRetryWindow, time.Second, liveconfig.MaxRetryWindow),
		MinBackoffMS: b.milliseconds("spec.delivery.retry.initialBackoff", d.Retry.InitialBackoff, time.Second, 10*time.Millisecond, time.Hour),
		MaxBackoffMS: b.milliseconds("spec.delivery.retry.maxBackoff", d.Retry.MaxBackoff, 5*time.Minute, 10*time.Millisecond, time.Hour),
		MaxInFlight:  1000,

		RetryStatusCodes: b.statusCodes(d.Retry.StatusCodes),
	}
	if c.MinBackoffMS > c.MaxBackoffMS {
		b.add(v1beta1.ReasonInvalidSpec, "spec.delivery.retry", "initialBackoff must not be larger than maxBackoff; lower it or raise maxBackoff")
		c.MaxBackoffMS = c.MinBackoffMS
	}
	if d.MaxInFlight != 0 {
		c.MaxInFlight = int(min(max(d.MaxInFlight, 1), liveconfig.MaxInFlight))
		if c.MaxInFlight != int(d.MaxInFlight) {
			b.add(v1beta1.ReasonInvalidSpec, "spec.delivery.maxInFlight", "must be between 1 and %d", liveconfig.MaxInFlight)
		}
	}
	if d.RateLimit != nil {
		c.RequestsPerSecond = int(d.RateLimit.RequestsPerSecond)
		if c.RequestsPerSecond < 1 {
			b.add(v1beta1.ReasonInvalidSpec, "spec.delivery.rateLimit.requestsPerSecond", "must be at least 1; leave rateLimit out for no limit")
			c.RequestsPerSecond = 1
		}
	}
	return c
}

// upTo returns a duration as milliseconds does, and at most the administrator's ceiling, which a
// flag sets. A set duration above it is a problem.
func (b *builder) upTo(ceiling time.Duration, flag, field string, d *v1beta1.Duration, unset, low, high time.Duration) int64 {
	ms := b.milliseconds(field, d, unset, low, high)
	if ms <= ceiling.Milliseconds() {
		return ms
	}
	if d != nil {
		b.add(v1beta1.ReasonCeilingExceeded, field, "%v is above this installation's ceiling of %v; lower it, or ask an administrator to raise the ceiling (%s)", d.Duration, ceiling, flag)
	}
	return ceiling.Milliseconds()
}

// maxStatusCodes is the largest number of codes in spec.delivery.retry.statusCodes.
const maxStatusCodes = 16

// statusCodes returns the response codes that are retried in addition to the default ones, sorted.
func (b *builder) statusCodes(codes []int32) []int {
	const field = "spec.delivery.retry.statusCodes"
	if len(codes) > maxStatusCodes {
		b.add(v1beta1.ReasonInvalidSpec, field, "must have at most %d codes", maxStatusCodes)
		return nil
	}
	var out []int
	for _, code := range codes {
		if code < 300 || code > 499 {
			b.add(v1beta1.ReasonInvalidSpec, field, "%d is not from 300 to 499; 5xx is always retried", code)
			continue
		}
		out = append(out, int(code))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// milliseconds returns a duration, or its default if it is unset or out of bounds. It does
// not use the bound instead: a retry window or retention at its lower bound would discard
// messages.
func (b *builder) milliseconds(field string, d *v1beta1.Duration, unset, low, high time.Duration) int64 {
	if d != nil && low <= d.Duration && d.Duration <= high {
		return d.Milliseconds()
	}
	if d != nil {
		b.add(v1beta1.ReasonInvalidSpec, field, "must be between %v and %v", low, high)
	}
	return unset.Milliseconds()
}

func (b *builder) filter(f *v1beta1.Filter) *liveconfig.Filter {
	if f == nil {
		return nil
	}
	c := &liveconfig.Filter{Events: slices.Clone(f.Events), Expression: f.Expression}
	for _, t := range f.Types {
		switch t {
		case "identify", "track", "page", "screen", "group", "alias":
			c.Types = append(c.Types, string(t))
		default:
			c.Invalid = true
			b.add(v1beta1.ReasonInvalidFilter, "spec.filter.types", "%q is unknown; use identify, track, page, screen, group or alias", t)
		}
	}
	if len(f.Types) == 0 && len(f.Events) == 0 && f.Expression == "" {
		b.add(v1beta1.ReasonInvalidFilter, "spec.filter", "set at least one of types, events and expression, or leave filter out")
	}
	if f.Expression != "" {
		if p, err := expression.Compile(f.Expression); err == nil {
			b.expression = b.expression.Plus(p.Size())
		} else {
			b.add(v1beta1.ReasonInvalidFilter, "spec.filter.expression", "%v", err)
			// A dispatcher would reject the whole config because of an invalid expression.
			c.Expression, c.Invalid = "", true
		}
	}
	return c
}

func (b *builder) successRule(s *v1beta1.Success) *liveconfig.SuccessRule {
	if s == nil {
		return nil
	}
	c := &liveconfig.SuccessRule{Expression: s.Expression, DeadLetter: s.OnFalse == v1beta1.OnFalseDeadLetter}
	switch s.OnFalse {
	case "", v1beta1.OnFalseRetry, v1beta1.OnFalseDeadLetter:
	default:
		b.add(v1beta1.ReasonInvalidSpec, "spec.success.onFalse", "%q is unknown; use Retry or DeadLetter", s.OnFalse)
	}
	p, err := expression.CompileSuccess(s.Expression)
	if err != nil {
		b.add(v1beta1.ReasonInvalidSpec, "spec.success.expression", "%v", err)
		return nil // The destination is paused, so nothing is sent without the rule.
	}
	b.expression = b.expression.Plus(p.Size())
	return c
}

// request returns what requests have instead of a POST of the message.
func (b *builder) request(r *v1beta1.RequestShape) *liveconfig.Request {
	if r == nil {
		return nil
	}
	const field = "spec.request"
	if r.Body == "" && r.Method == "" && r.Path == "" && r.Query == "" && len(r.Headers) == 0 {
		b.add(v1beta1.ReasonInvalidSpec, field, "set at least one of body, method, path, query and headers, or leave request out")
	}
	c := &liveconfig.Request{
		Body: b.transform(field+".body", r.Body), Path: b.transform(field+".path", r.Path), Query: b.transform(field+".query", r.Query),
	}
	switch r.ContentType {
	case "", v1beta1.ContentJSON:
	case v1beta1.ContentForm, v1beta1.ContentText, v1beta1.ContentCloudEvents:
		if c.ContentType = string(r.ContentType); r.Body == "" {
			b.add(v1beta1.ReasonInvalidSpec, field+".contentType", "Form, Text and CloudEvents need a body")
		}
	default:
		b.add(v1beta1.ReasonInvalidSpec, field+".contentType", "%q is unknown; use JSON, Form, Text or CloudEvents", r.ContentType)
	}
	switch r.Method {
	case "", v1beta1.MethodPost:
	case v1beta1.MethodPut, v1beta1.MethodPatch, v1beta1.MethodDelete:
		c.Method = string(r.Method)
	default:
		b.add(v1beta1.ReasonInvalidSpec, field+".method", "%q is unknown; use POST, PUT, PATCH or DELETE", r.Method)
	}
	if n := len(r.Headers); n > maxRequestHeaders {
		b.add(v1beta1.ReasonInvalidSpec, field+".headers", "%d headers; at most %d are allowed", n, maxRequestHeaders)
		return c
	}
	for _, h := range r.Headers {
		field := fmt.Sprintf("%s.headers[%s]", field, h.Name)
		if broken := checkHeaderName(h.Name); broken != "" {
			b.add(v1beta1.ReasonInvalidSpec, field+".name", "%s", broken)
		} else if slices.ContainsFunc(c.Headers, func(o liveconfig.RequestHeader) bool { return strings.EqualFold(o.Name, h.Name) }) {
			b.add(v1beta1.ReasonInvalidSpec, field+".name", "header names must be unique, regardless of case; remove one")
		} else if h.Expression == "" {
			b.add(v1beta1.ReasonInvalidSpec, field+".expression", "must be set")
		} else {
			c.Headers = append(c.Headers, liveconfig.RequestHeader{Name: h.Name, Expression: b.transform(field+".expression", h.Expression)})
		}
	}
	return c
}

const maxRequestHeaders = 16

// transform checks an expression of spec.request.
func (b *builder) transform(field, text string) string {
	if text == "" {
		return ""
	}
	t, err := expression.CompileTransform(text)
	if err != nil {
		b.add(v1beta1.ReasonInvalidSpec, field, "%v", err)
		return ""
	}
	b.expression = b.expression.Plus(t.Size())
	return text
}

// checkRequestHeaders reports the headers of spec.request that another field sets.
func (b *builder) checkRequestHeaders(r *liveconfig.Request, endpoints []v1beta1.Endpoint, schemes liveconfig.SigningSchemes) {
	if r == nil {
		return
	}
	for _, h := range r.Headers {
		by := ""
		for _, s := range schemes {
			if s.Format != nil && (strings.EqualFold(h.Name, s.Format.Header) || strings.EqualFold(h.Name, s.Format.Header+"-Previous")) {
				by = fmt.Sprintf("the signing scheme %q", s.Name)
			}
		}
		for _, e := range endpoints {
			if e.Authentication != nil && strings.EqualFold(h.Name, headerAuthorization) ||
				slices.ContainsFunc(e.Headers, func(o v1beta1.Header) bool { return strings.EqualFold(o.Name, h.Name) }) {
				by = fmt.Sprintf("the endpoint %q", e.Name)
			}
		}
		if by != "" {
			b.add(v1beta1.ReasonInvalidSpec, fmt.Sprintf("spec.request.headers[%s]", h.Name), "%s sets this header; remove one or choose another name", by)
		}
	}
}

func (b *builder) deadLetters(d v1beta1.DeadLetters) liveconfig.DeadLetters {
	const week, year = 168 * time.Hour, 8760 * time.Hour
	c := liveconfig.DeadLetters{
		RetentionMS: b.milliseconds("spec.deadLetters.retention", d.Retention, week, 0, year),
		MaxBytes:    1 << 30,
	}
	if d.MaxBytes != nil {
		if d.MaxBytes.Sign() < 0 || d.MaxBytes.CmpInt64(1<<40) > 0 {
			b.add(v1beta1.ReasonInvalidSpec, "spec.deadLetters.maxBytes", "must be between 0 and 1Ti")
		} else {
			c.MaxBytes = d.MaxBytes.Value()
		}
	}
	return c
}

// forwardTo returns the name of the destination that gets the dead letters, also if it cannot take
// them yet: the dead letters then wait. A target does not forward itself, so that there is no cycle
// and every dead letter is forwarded at most once.
func (b *builder) forwardTo(o *v1beta1.WebhookDestination, all []*v1beta1.WebhookDestination) string {
	const field = "spec.deadLetters.forwardTo.destinationRef.name"
	if o.Spec.DeadLetters.ForwardTo == nil {
		return ""
	}
	name := o.Spec.DeadLetters.ForwardTo.DestinationRef.Name
	i := slices.IndexFunc(all, func(d *v1beta1.WebhookDestination) bool { return d.Name == name })
	switch {
	case name == "":
		b.add(v1beta1.ReasonInvalidSpec, field, "must be set")
	case name == o.Name:
		b.add(v1beta1.ReasonInvalidSpec, field, "must not name this destination; name another one")
	case i < 0:
		b.add(v1beta1.ReasonDestinationNotFound, field, "WebhookDestination %q does not exist in this namespace; create it or change the reference (dead letters wait for it)", name)
	case all[i].Spec.DeadLetters.ForwardTo != nil:
		b.add(v1beta1.ReasonInvalidForwardTarget, field, "WebhookDestination %q forwards its own dead letters; dead letters are forwarded once, so name a destination without deadLetters.forwardTo (dead letters wait for it)", name)
	case !slices.Contains(all[i].Spec.SourceRefs, v1beta1.SourceReference{Name: liveconfig.SourceDeadLetters}):
		b.add(v1beta1.ReasonInvalidForwardTarget, field, "WebhookDestination %q does not get forwarded dead letters; add the Source %s to its sourceRefs (dead letters wait for it)", name, liveconfig.SourceDeadLetters)
	}
	return name
}
