package v1beta1

// Authentication is how requests to an endpoint authenticate. It sets the header
// Authorization. While a Secret is missing, nothing is sent, messages are kept, and
// ResolvedRefs is False.
// +kubebuilder:validation:XValidation:rule="[has(self.bearer), has(self.basic), has(self.oauth2)].filter(x, x).size() == 1",message="set exactly one of bearer, basic and oauth2"
type Authentication struct {
	// Sends a constant token: Authorization: Bearer TOKEN.
	// +optional
	Bearer *BearerAuthentication `json:"bearer,omitempty"`

	// Sends a user name and a password: Authorization: Basic.
	// +optional
	Basic *BasicAuthentication `json:"basic,omitempty"`

	// Requests access tokens with the OAuth 2.0 client credentials grant (RFC 6749,
	// section 4.4), and sends them as bearer tokens.
	// +optional
	OAuth2 *OAuth2Authentication `json:"oauth2,omitempty"`
}

// BearerAuthentication is a constant bearer token (RFC 6750).
type BearerAuthentication struct {
	// The Secret key that contains the token: printable ASCII. White space around it is
	// ignored.
	// +required
	SecretKeyRef SecretKeyReference `json:"secretKeyRef"`
}

// BasicAuthentication is a user name with a password (RFC 7617).
type BasicAuthentication struct {
	// A Secret of type kubernetes.io/basic-auth (keys username and password).
	// +required
	SecretRef SecretReference `json:"secretRef"`
}

// OAuth2Authentication configures the client credentials grant. A token is requested
// before the first request, again before it expires, and once when the endpoint answers
// 401. While no token can be obtained, messages are retried with the reason TokenFailed.
type OAuth2Authentication struct {
	// The full URL of the token endpoint, with https://, which OAuth 2.0 requires. The egress policy
	// applies to it. At most 2,048 characters.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:XValidation:rule="!self.matches('%([^0-9A-Fa-f]|.[^0-9A-Fa-f]|.?$)')",message="has a % that no two hexadecimal digits follow; write %25 for a percent sign"
	// +kubebuilder:validation:XValidation:rule="isURL(self) ? url(self).getScheme() == 'https' && url(self).getHostname() != '' : self.matches('%([^0-9A-Fa-f]|.[^0-9A-Fa-f]|.?$)')",message="must be a full URL that starts with https:// and names a host"
	// +kubebuilder:validation:XValidation:rule="!isURL(self) || url(self).getPort() == '' || (int(url(self).getPort()) >= 1 && int(url(self).getPort()) <= 65535)",message="the port must be between 1 and 65535"
	// +kubebuilder:validation:XValidation:rule="!self.contains('#')",message="must not have a fragment (#...); remove it"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^[a-zA-Z]+://[^/?]*@')",message="must not contain a user name or password; set clientID and clientSecretKeyRef"
	// +required
	TokenURL string `json:"tokenURL"`

	// The client identifier. At most 1,024 characters.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	// +required
	ClientID string `json:"clientID"`

	// The Secret key that contains the client secret. A line break at its end is not used.
	// +required
	ClientSecretKeyRef SecretKeyReference `json:"clientSecretKeyRef"`

	// How the client authenticates at the token endpoint. Header: by HTTP Basic
	// authentication. Body: by the parameters client_id and client_secret. Default Header.
	// +kubebuilder:validation:Enum=Header;Body
	// +optional
	ClientAuthentication ClientAuthentication `json:"clientAuthentication,omitempty"`

	// The requested scopes. At most 32.
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=256
	// +kubebuilder:validation:items:XValidation:rule=`self.matches(r'^[!#-\[\]-~]+$')`,message="must be printable ASCII without spaces, quotes and backslashes"
	// +listType=set
	// +optional
	Scopes []string `json:"scopes,omitempty"`

	// The parameter audience of the token request, which some providers require. At most
	// 1,024 characters.
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Audience string `json:"audience,omitempty"`

	// Additional parameters of the token request, such as resource. At most 16.
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=name
	// +optional
	Parameters []TokenParameter `json:"parameters,omitempty"`

	// TLS settings of the token URL. Default: the system's certificate authorities are trusted.
	// +optional
	TLS *EndpointTLS `json:"tls,omitempty"`
}

// TokenParameter is an additional parameter of a token request.
type TokenParameter struct {
	// Name of the parameter. Parameters that other fields set are rejected.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="!(self in ['grant_type', 'client_id', 'client_secret', 'scope', 'audience'])",message="this parameter has a field of its own; remove it here"
	// +required
	Name string `json:"name"`

	// Value of the parameter. At most 1,024 characters.
	// +kubebuilder:validation:MaxLength=1024
	// +required
	Value string `json:"value"`
}

// ClientAuthentication is how an OAuth 2.0 client authenticates at the token endpoint.
type ClientAuthentication string

// The ways of client authentication.
const (
	ClientAuthenticationHeader ClientAuthentication = "Header"
	ClientAuthenticationBody   ClientAuthentication = "Body"
)
