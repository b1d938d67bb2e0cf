package v1beta1

// ObjectReference names an object in the same namespace; the field determines its kind.
// +structType=atomic
type ObjectReference struct {
	// Name of the object.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Name string `json:"name"`
}

// SourceReference names a Source whose calls a WebhookDestination receives.
// +structType=atomic
type SourceReference struct {
	// Namespace of the Source. Only "", the default, is allowed: the namespace of the object that
	// refers to the Source.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self == ''",message="a Source of another namespace cannot be named yet; remove namespace"
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Name of the Source.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Name string `json:"name"`
}

// SecretKeyReference names one key of a Secret in the same namespace.
// +structType=atomic
type SecretKeyReference struct {
	// Name of the Secret. It must be in the same namespace as the object that refers to it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",message="must be lower case letters, digits, '-' and '.', as the names of Secrets are"
	// +required
	Name string `json:"name"`

	// Key within the Secret's data.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[-._a-zA-Z0-9]+$')",message="must be letters, digits, '-', '_' and '.', as the keys of Secrets are"
	// +required
	Key string `json:"key"`
}

// ConfigMapKeyReference names one key of a ConfigMap in the same namespace.
// +structType=atomic
type ConfigMapKeyReference struct {
	// Name of the ConfigMap. It must be in the same namespace as the object that refers to it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",message="must be lower case letters, digits, '-' and '.', as the names of ConfigMaps are"
	// +required
	Name string `json:"name"`

	// Key within the ConfigMap's data.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[-._a-zA-Z0-9]+$')",message="must be letters, digits, '-', '_' and '.', as the keys of ConfigMaps are"
	// +required
	Key string `json:"key"`
}

// SecretReference names a Secret in the same namespace.
// +structType=atomic
type SecretReference struct {
	// Name of the Secret. It must be in the same namespace as the object that refers to it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",message="must be lower case letters, digits, '-' and '.', as the names of Secrets are"
	// +required
	Name string `json:"name"`
}

// ValueFromSecret reads a value from a Secret.
type ValueFromSecret struct {
	// The Secret and key to read. If one is missing, ResolvedRefs is False
	// (SecretNotFound, SecretKeyMissing), and messages are kept and not sent.
	// +required
	SecretKeyRef SecretKeyReference `json:"secretKeyRef"`
}
