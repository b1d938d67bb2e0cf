package compile

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

const headerAuthorization = "Authorization"

// secretsOfAuthentication returns the names of the Secrets that an endpoint's authentication
// refers to.
func secretsOfAuthentication(a *v1beta1.Authentication) (names []string) {
	if a == nil {
		return nil
	}
	if a.Bearer != nil {
		names = append(names, a.Bearer.SecretKeyRef.Name)
	}
	if a.Basic != nil {
		names = append(names, a.Basic.SecretRef.Name)
	}
	if a.OAuth2 != nil {
		names = append(names, a.OAuth2.ClientSecretKeyRef.Name)
		names = append(names, secretsOfTLS(a.OAuth2.TLS)...)
	}
	return names
}

// authentication adds an endpoint's authentication: a header, or a client of a token endpoint.
func (b *builder) authentication(field string, a *v1beta1.Authentication, c *liveconfig.Endpoint) {
	if a == nil {
		return
	}
	set := 0
	for _, is := range []bool{a.Bearer != nil, a.Basic != nil, a.OAuth2 != nil} {
		if is {
			set++
		}
	}
	if set != 1 {
		b.add(v1beta1.ReasonInvalidSpec, field, "set exactly one of bearer, basic and oauth2")
		return
	}
	if slices.ContainsFunc(c.Headers, func(h liveconfig.Header) bool { return strings.EqualFold(h.Name, headerAuthorization) }) {
		b.add(v1beta1.ReasonInvalidSpec, field, "authentication sets the header Authorization; remove it from headers, or remove authentication")
		return
	}
	value, ok := "", false
	switch {
	case a.Bearer != nil:
		value, ok = b.bearer(field+".bearer.secretKeyRef", a.Bearer.SecretKeyRef)
	case a.Basic != nil:
		value, ok = b.basic(field+".basic.secretRef", a.Basic.SecretRef.Name)
	default:
		c.OAuth2 = b.oauth2(field+".oauth2", a.OAuth2)
	}
	if ok {
		c.Headers = append(c.Headers, liveconfig.Header{Name: headerAuthorization, Value: liveconfig.NewSecret(value)})
	}
}

// bearer returns the value of the header Authorization for a constant token.
func (b *builder) bearer(field string, ref v1beta1.SecretKeyReference) (string, bool) {
	value, ok := b.text(field, ref)
	if !ok {
		return "", false
	}
	token := strings.TrimSpace(value)
	broken := checkHeaderValue(token)
	if broken == "" && len(strings.Fields(token)) > 1 {
		broken = "contains a space; store the token without \"Bearer\""
	}
	if broken != "" {
		b.add(v1beta1.ReasonInvalidSecret, field, "the value in key %q of Secret %q %s", ref.Key, ref.Name, broken)
		return "", false
	}
	return "Bearer " + token, true
}

// basic returns the value of the header Authorization for a user name and a password. Spaces are part of
// them, as in HTTP clients.
func (b *builder) basic(field, name string) (string, bool) {
	secret, ok := b.secret(field, name)
	if !ok {
		return "", false
	}
	user, userOK := b.textOf(field, name, secret, corev1.BasicAuthUsernameKey)
	password, passwordOK := b.textOf(field, name, secret, corev1.BasicAuthPasswordKey)
	if !userOK || !passwordOK {
		return "", false
	}
	if strings.Contains(user, ":") {
		b.add(v1beta1.ReasonInvalidSecret, field, "key %q of Secret %q contains a colon, which a user name of Basic authentication must not have", corev1.BasicAuthUsernameKey, name)
		return "", false
	}
	value := "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
	if broken := checkHeaderValue(value); broken != "" {
		b.add(v1beta1.ReasonInvalidSecret, field, "the header made of Secret %q %s", name, broken)
		return "", false
	}
	return value, true
}

// The bounds of the API for spec.endpoints[].authentication.oauth2.
const (
	maxScopes     = 32
	maxParameters = 16
)

// oauth2 returns the client of a token endpoint; nil if its spec is invalid or a reference does
// not resolve. Then the destination is paused.
func (b *builder) oauth2(field string, o *v1beta1.OAuth2Authentication) *liveconfig.OAuth2 {
	before := len(b.problems)
	c := &liveconfig.OAuth2{TokenURL: o.TokenURL, ClientID: o.ClientID, Scopes: slices.Clone(o.Scopes), TLS: b.tls(field+".tls", o.TLS)}
	u, broken := checkURL(o.TokenURL)
	if broken == "" && u.Scheme != "https" {
		broken = "must start with https://, which OAuth 2.0 requires"
	}
	if broken != "" {
		b.add(v1beta1.ReasonInvalidURL, field+".tokenURL", "%s", broken)
	} else if b.policy.CheckHost != nil {
		if err := b.policy.CheckHost(u.Hostname()); err != nil {
			b.add(v1beta1.ReasonEgressDenied, field+".tokenURL", "%s", err)
		}
	}
	if o.ClientID == "" {
		b.add(v1beta1.ReasonInvalidSpec, field+".clientID", "is empty; set the client's identifier")
	}
	if secret, ok := b.text(field+".clientSecretKeyRef", o.ClientSecretKeyRef); ok {
		c.ClientSecret = liveconfig.NewSecret(secret)
	}
	switch o.ClientAuthentication {
	case "", v1beta1.ClientAuthenticationHeader:
	case v1beta1.ClientAuthenticationBody:
		c.SecretInBody = true
	default:
		b.add(v1beta1.ReasonInvalidSpec, field+".clientAuthentication", "%q is unknown; use %s or %s", o.ClientAuthentication,
			v1beta1.ClientAuthenticationHeader, v1beta1.ClientAuthenticationBody)
	}
	if len(o.Scopes) > maxScopes {
		b.add(v1beta1.ReasonInvalidSpec, field+".scopes", "%d scopes; at most %d are allowed", len(o.Scopes), maxScopes)
	}
	c.Parameters = b.tokenParameters(field, o)
	if len(b.problems) > before {
		return nil
	}
	return c
}

// tokenParameters returns the additional parameters of a token request.
func (b *builder) tokenParameters(field string, o *v1beta1.OAuth2Authentication) map[string]string {
	if len(o.Parameters) > maxParameters {
		b.add(v1beta1.ReasonInvalidSpec, field+".parameters", "%d parameters; at most %d are allowed", len(o.Parameters), maxParameters)
	}
	parameters := map[string]string{}
	if o.Audience != "" {
		parameters["audience"] = o.Audience
	}
	for _, p := range o.Parameters {
		field := fmt.Sprintf("%s.parameters[%s]", field, p.Name)
		switch p.Name {
		case "grant_type", "client_id", "client_secret", "scope", "audience":
			b.add(v1beta1.ReasonInvalidSpec, field, "this parameter has a field of its own; remove it here")
			continue
		}
		if _, ok := parameters[p.Name]; ok || p.Name == "" {
			b.add(v1beta1.ReasonInvalidSpec, field, "the name is empty or not unique")
			continue
		}
		parameters[p.Name] = p.Value
	}
	if len(parameters) == 0 {
		return nil
	}
	return parameters
}
